"""A mesh-and-rule file, as MaxText writes them, becomes layouts.

    python examples/rules_to_layouts.py

A rule file names mesh axes and says which of them shard which logical dims. Any process can ask for any rank's part; no
device is touched. `load_rules` takes a path as well, and the names of files that come along.

Output:

    mesh: fsdp 8, expert 2
    ('embed', 'mlp') is sharded over (('fsdp', 'expert'), None)
    ('exp', 'embed', 'mlp') is sharded over ('expert', None, None)
    ('norm',) is sharded over (None,)
    rank 5 of 16 holds ((640, 768), (0, 8192)), 2097152 bytes
    a tensor [2048, 8192]
      dim 0 embed = 2048: sharded over fsdp x expert into 16: rule [embed, [fsdp, expert]] (ready/ep-as-cp.yml:...)
      dim 1 mlp = 8192: stays whole: rule [mlp, []] (ready/ep-as-cp.yml:...)
"""

from lowshard.rules import load_rules

rules = load_rules("ep-as-cp")
mesh = rules.mesh(devices=16, ici={"fsdp": -1, "expert": 2})  # -1: what is left
print("mesh:", ", ".join(f"{n} {s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True) if s > 1))
for names in (("embed", "mlp"), ("exp", "embed", "mlp"), ("norm",)):
    print(names, "is sharded over", rules.resolve(names))
layout = rules.layout(mesh, ("embed", "mlp"), (2048, 8192), "bfloat16")
print(f"rank 5 of {mesh.size} holds {layout.box(5)}, {layout.local_bytes(5)} bytes")
print(rules.explain(("embed", "mlp"), (2048, 8192), mesh))
