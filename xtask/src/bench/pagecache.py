"""In the guest: mounts two images, reads all of both, and prints what the kernel's memory grew by.

Arguments: how to mount (`quire` or `erofs`), whether to share, the store or folder, the two images, and the files whose own
pages (metadata) are counted apart. Prints one line: RESULT, then bytes of page cache, of slab, of those files.
"""
import ctypes
import os
import subprocess
import sys

how, share, place, first, second, *own = sys.argv[1:]
points = ["/run/first", "/run/second"]
libc = ctypes.CDLL(None, use_errno=True)
for point, image in zip(points, [first, second]):
    os.makedirs(point, exist_ok=True)
    if how == "quire":
        domain = [] if share == "on" else ["--domain", "none"]
        command = [os.environ["QUIRE"], "--store", place, "--quiet", "mount", *domain, image, point]
        subprocess.run(command, check=True)
    else:
        options = b"directio" + (b",inode_share,domain_id=bench" if share == "on" else b"")
        source = os.path.join(place, image).encode()
        # 1: MS_RDONLY
        if libc.mount(source, point.encode(), b"erofs", 1, options) != 0:
            sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")


def memory():
    lines = [line.split() for line in open("/proc/meminfo")]
    values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return values["Cached"] + values["Buffers"], values["Slab"]


def drop():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3\n")


def read_all():
    count = 0
    buffer = bytearray(1 << 20)
    for point in points:
        for folder, _, names in os.walk(point):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.islink(path) or not os.path.isfile(path):
                    continue
                with open(path, "rb", buffering=0) as file:
                    while True:
                        read = file.readinto(buffer)
                        if read == 0:
                            break
                        count += read
    return count


def pages(files):
    if not files:
        return 0
    command = ["fincore", "--noheadings", "--bytes", "--output", "RES", *files]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(line) for line in output.split())


try:
    # Once for what this program itself takes; what it has mapped stays.
    memory()
    drop()
    drop()
    before = memory()
    count = read_all()
    after = memory()
    print("RESULT", after[0] - before[0], after[1] - before[1], pages(own), count)
finally:
    for point in points:
        subprocess.run(["umount", point], check=True)
