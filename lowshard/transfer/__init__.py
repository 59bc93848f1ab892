"""The one mover of boxes; "The mover of boxes" in ARCHITECTURE.md has the drawing.

What is moved is a list for each peer: a span of its memory, a span of ours, perhaps a transform. `Communicator.reach`
says whose memory is in reach, and the way is chosen for each peer.

- `spans`: strided boxes in memory, and the one call that copies many: here, or (`cross_memory`) out of the private
  memory of another process; `peer_write_kernel`: into it.
- `rounds`: what is staged or sent, in rounds of bounded size; two halves, filled and taken in turn.
- `rank_schedule`, `exchange_runner`: the exchanges of one array, for `execute`.
- `item`, `mover`, `buckets`: many arrays, made ready once and moved again and again, for resharding; `conversion`,
  `transform_contract`: what they go through; `piece_checksum`: what they are checked by.
"""
