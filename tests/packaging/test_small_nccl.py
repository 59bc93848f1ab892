"""docs/small_nccl.py on a library made for it: what stays, what becomes zeros, what is left alone."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "small_nccl.py"


def entry(architecture: int, body: bytes) -> bytes:
    return struct.pack("<HHIQ12xI32x", 2, 1, 64, len(body), architecture) + body


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*parts: tuple[bytes, bytes]) -> bytes:
    """Return an ELF file as far as its sections go."""
    names, content, rows = b"\0", bytes(64), [bytes(64)]
    for name, body in (*parts, (b".shstrtab", b"")):
        number, names = len(names), names + name + b"\0"
        body = body or names
        rows.append(struct.pack("<IIQQQQIIQQ", number, 1, 0, 0, len(content), len(body), 0, 0, 8, 0))
        content += body.ljust(-(-len(body) // 8) * 8, b"\0")
    image = bytearray(content + b"".join(rows))
    struct.pack_into("<Q", image, 0x28, len(content))
    struct.pack_into("<HHH", image, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(image)


def test_one_architectures_code_is_kept(tmp_path: Path) -> None:
    old, ours, new = (entry(n, bytes([n]) * 24) for n in (80, 90, 120))
    both, other = container(old, ours, new), container(old)
    whole = library(
        (b".text", b"host code"), (b".nv_fatbin", both + bytes(8) + other), (b"__nv_relfatbin", b"link" * 4)
    )
    (tmp_path / "whole").write_bytes(whole)

    def run(architecture: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "whole", "small", str(architecture)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    done = run(90)
    assert done.stdout == "1 of 4 pieces of device code kept, for sm_90\n", done.stderr
    kept = container(ours).ljust(len(both), b"\0")
    expected = whole.replace(both, kept).replace(b"link" * 4, bytes(16))
    assert (tmp_path / "small").read_bytes() == expected
    assert len(expected) == len(whole)
    missing = run(75)
    assert missing.returncode == 1
    assert "no device code for sm_75" in missing.stderr
