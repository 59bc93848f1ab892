"""Make NCCL's library small enough to carry: the device code of one architecture stays, the rest becomes zeros.

    python small_nccl.py nvidia/nccl/lib/libnccl.so.2 libnccl.so.2 90
    xz libnccl.so.2

The file keeps its length and its layout; it is the compressor that makes it small. Device code lies in containers of
the ELF section .nv_fatbin: a header, then entries for architectures. What is kept moves to the front of its container,
and the container's header says how much that is. Code for linking (__nv_relfatbin) is not needed to run.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import sys

SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr: name, type, flags, address, offset, size, ...
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes after it
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes after it
MAGIC, ARCHITECTURE_AT = 0xBA55ED50, 28


def sections(image: mmap.mmap) -> dict[bytes, tuple[int, int]]:
    """Return the offset and the bytes of each section."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    bytes_each, count, of_names = struct.unpack_from("<HHH", image, 0x3A)
    rows = [SECTION.unpack_from(image, table + i * bytes_each) for i in range(count)]
    names = rows[of_names][4]
    return {image[names + row[0] : image.find(b"\0", names + row[0])]: (row[4], row[5]) for row in rows}


def keep_one(image: mmap.mmap, offset: int, size: int, architecture: int) -> tuple[int, int]:
    """Clear all entries but those of one architecture; return how many were kept, of how many."""
    kept = seen = 0
    at, end = offset, offset + size
    while at + CONTAINER.size <= end:
        magic, version, header, body = CONTAINER.unpack_from(image, at)
        if magic != MAGIC:
            at += 8
            continue
        first = entry = at + header
        stop, found = first + body, b""
        while entry < stop:
            _, _, entry_header, entry_body = ENTRY.unpack_from(image, entry)
            (of,) = struct.unpack_from("<I", image, entry + ARCHITECTURE_AT)
            seen += 1
            if of == architecture:
                kept += 1
                found += image[entry : entry + entry_header + entry_body]
            entry += entry_header + entry_body
        if found:  # else it is left as it is: CUDA asks each container what it has
            image[first:stop] = found.ljust(body, b"\0")
            CONTAINER.pack_into(image, at, magic, version, header, len(found))
        at = stop
    return kept, seen


def main(source: str, target: str, architecture: int) -> None:
    """Write the smaller library.

    Raises:
        SystemExit: it has no code for the architecture, or none at all.
    """
    shutil.copyfile(source, target)
    with open(target, "r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        found = sections(image)
        kept, seen = keep_one(image, *found.get(b".nv_fatbin", (0, 0)), architecture)
        offset, size = found.get(b"__nv_relfatbin", (0, 0))
        image[offset : offset + size] = bytes(size)
    print(f"{kept} of {seen} pieces of device code kept, for sm_{architecture}")
    if not kept:
        raise SystemExit(f"{source} has no device code for sm_{architecture}: {target} is of no use")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
