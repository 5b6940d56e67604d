"""Native sparse attention as the paper writes it, in fp64, one query and one head at a time, with
explicit masks. Slow and apart: it imports nothing of Paceline, so both cannot share a mistake.

    l, d     a compressed key stands for tokens [i d, i d + l)
    l2, n    n blocks of l2 tokens are selected
    w        the window
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Letters:
    l: int  # noqa: E741
    d: int
    l2: int
    n: int
    w: int


def over(q_E: Tensor, keys_SE: Tensor, values_SE: Tensor, sees_S: Tensor) -> Tensor:
    """Attention of one query over the keys that it sees; zeros where it sees none."""
    if not bool(sees_S.any()):
        return torch.zeros_like(values_SE[0]) if len(values_SE) else q_E * 0
    return weights_of(q_E, keys_SE, sees_S) @ values_SE


def weights_of(q_E: Tensor, keys_SE: Tensor, sees_S: Tensor) -> Tensor:
    scores = (keys_SE @ q_E) / len(q_E) ** 0.5
    return torch.softmax(scores.masked_fill(~sees_S, -torch.inf), dim=0)


def compress(x_SE: Tensor, z: Letters) -> Tensor:
    starts = range(0, len(x_SE) - z.l + 1, z.d)
    return torch.stack([x_SE[i : i + z.l].mean(dim=0) for i in starts]) if starts else x_SE[:0]


def choose(heads_weights: list[Tensor], t: int, first: int, z: Letters) -> list[int]:
    """Eq. 9 to 12: scores of blocks from the weights of all heads of a group, then the best n."""
    candidates = [j for j in range(t // z.l2 + 1) if (j + 1) * z.l2 > first]
    must = {candidates[0], t // z.l2, max(t // z.l2 - 1, candidates[0])}
    score = {j: 0.0 for j in candidates}
    for weights in heads_weights:
        for i, weight in enumerate(weights.tolist()):
            for token in range(i * z.d, i * z.d + z.l):
                if token // z.l2 in score:
                    score[token // z.l2] += weight / z.d
    free = sorted((j for j in candidates if j not in must), key=lambda j: (-score[j], j))
    return sorted([*must, *free[: max(0, z.n - len(must))]])


def attend(
    q_THE: Tensor, kv: dict[str, Tensor], gates_TH3: Tensor, z: Letters, firsts: list[int]
) -> tuple[Tensor, list[list[list[int]]]]:
    """One sequence: `kv` has k_cmp, v_cmp (compressed already, M G E), k_sel, v_sel, k_win, v_win
    (S G E). Returns the output (T, H, E) and the chosen blocks of each query and group."""
    T, H, E = q_THE.shape
    G = kv["k_sel"].shape[1]
    token_T = torch.arange(T)
    begin_M = torch.arange(kv["k_cmp"].shape[0]) * z.d
    rows, chosen = [], []
    for t in range(T):
        first = firsts[t]
        whole = (begin_M >= first) & (begin_M + z.l - 1 <= t)
        near = (token_T <= t) & (token_T > t - z.w) & (token_T >= first)
        heads, of_groups = [], []
        for g in range(G):
            members = range(g * H // G, (g + 1) * H // G)
            looks = [
                weights_of(q_THE[t, h].detach(), kv["k_cmp"][:, g].detach(), whole)
                for h in members
                if bool(whole.any())
            ]
            blocks = choose(looks, t, first, z)
            of_groups.append(blocks)
            picked = torch.tensor([i // z.l2 in blocks for i in range(T)])
            picked &= (token_T <= t) & (token_T >= first)
            for h in members:
                parts = [
                    over(q_THE[t, h], kv["k_cmp"][:, g], kv["v_cmp"][:, g], whole),
                    over(q_THE[t, h], kv["k_sel"][:, g], kv["v_sel"][:, g], picked),
                    over(q_THE[t, h], kv["k_win"][:, g], kv["v_win"][:, g], near),
                ]
                heads.append(sum(gates_TH3[t, h, c] * parts[c] for c in range(3)))
        rows.append(torch.stack(heads))
        chosen.append(of_groups)
    return torch.stack(rows), chosen
