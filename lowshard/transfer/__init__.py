"""The mover of boxes; "The mover of boxes" in ARCHITECTURE.md has the drawing.

For each peer there is a list of moves: a span of its memory, a span of this rank's, perhaps a transform.
`Communicator.reach` says whose memory this rank can read, which decides how bytes move for each peer.

- `spans`: strided boxes in memory, and the one call that copies many: here, or (`cross_memory`) out of the private
  memory of another process.
- `rank_schedule`: the exchanges of one array, for `lowshard.execute`.
- `item`, `mover`, `buckets`: many arrays, prepared once and moved again and again, for resharding; staged or sent data
  goes in rounds of bounded size, two buffers filled and read in turn; `conversion`, `transform_contract`: transforms.
"""
