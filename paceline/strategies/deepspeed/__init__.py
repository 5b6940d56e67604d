"""DeepSpeed's engine under our loop: optional. Read `strategy`, then `engine`.

strategy  what it holds and sends, what is refused; needs no deepspeed, so a laptop can plan
config    its keys, and DeepSpeed's own config, generated from ours
engine    DeepSpeed's engine as one of ours
state     its flat parts to and from the rows of a checkpoint
waits     where it waits for other ranks
"""
