"""One process per stage, real sends and receives. Read `strategy`, then `build` and `engine`.

plan      its keys; which rank holds which blocks, in how many parts a batch goes through them
ghosts    placeholders in a stage's model for what other stages hold
build     a model cut in place to one stage of it; the groups, the engine
stage     a part of the workload's own forward pass, as a module; and a batch relayed through all
          stages, forward only: evaluation, and the shapes of what is sent
recorder  when every action ran
by_torch  the schedules of torch.distributed.pipelining
dualpipe  ours, from the plain data of paceline/schedules
holdings  which ranks hold which weights, and the gradients they sum
"""
