"""The main job on a real checkpoint: what `lowshard demo` runs, and the parts it is made of."""
