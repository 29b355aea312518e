"""In the guest: mounts two images, reads all of both, and prints what the kernel's memory grew by.

Arguments: how to read (`read` or `sendfile`), how to mount (`quire` or `erofs`), whether to share, the store or folder, the two
images, and the files whose own pages (metadata) are counted apart. Prints one line: RESULT, then bytes of page cache; of slab; of the page cache what is
of those files, of folders, of the disk's own metadata, and what an empty run of the reader adds.
"""
import ctypes
import os
import subprocess
import sys

POINTS = ["/run/first", "/run/second"]
libc = ctypes.CDLL(None, use_errno=True)


def mount(how, share, place, images):
    for point, image in zip(POINTS, images):
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


def unmount():
    for point in POINTS:
        subprocess.run(["umount", point], check=True)


def memory():
    with open("/proc/meminfo") as file:
        lines = [line.split() for line in file]
    values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return values["Cached"] + values["Buffers"], values["Slab"], values["Buffers"]


def drop():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3\n")


def read_all(way, points):
    count = 0
    buffer = bytearray(1 << 20)
    nowhere = os.open("/dev/null", os.O_WRONLY)
    for point in points:
        for folder, _, names in os.walk(point):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.islink(path) or not os.path.isfile(path):
                    continue
                with open(path, "rb", buffering=0) as file:
                    while True:
                        if way == "sendfile":
                            read = os.sendfile(nowhere, file.fileno(), None, len(buffer))
                        else:
                            read = file.readinto(buffer)
                        if read == 0:
                            break
                        count += read
    os.close(nowhere)
    return count


def pages(files):
    if not files:
        return 0
    command = ["fincore", "--noheadings", "--bytes", "--output", "RES", *files]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(line) for line in output.split())


def pages_of_folders():
    """By cachestat(2), since a folder cannot be mapped."""
    whole, found, count = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)(), 0
    for point in POINTS:
        for folder, _, _ in os.walk(point):
            descriptor = os.open(folder, os.O_RDONLY)
            if libc.syscall(451, descriptor, whole, found, 0) != 0:
                sys.exit(f"cachestat: {os.strerror(ctypes.get_errno())}")
            os.close(descriptor)
            count += found[0] * 4096
    return count


def main():
    way, how, share, place, first, second, *own = sys.argv[1:]
    # What the reader does, on a little that is in memory anyway.
    little = "/run/little"
    os.makedirs(os.path.join(little, "folder"), exist_ok=True)
    if not os.path.lexists(os.path.join(little, "link")):
        os.symlink("file", os.path.join(little, "link"))
    with open(os.path.join(little, "folder", "file"), "w") as file:
        file.write("content")
    mount(how, share, place, [first, second])
    try:
        # Pages of this program that it has mapped stay, others are read again: by the run that is not counted.
        read_all(way, [little])
        memory()
        drop()
        drop()
        alone = memory()
        read_all(way, [little])
        before = memory()
        read_all(way, POINTS)
        after = memory()
        images = pages(own)
        cache, slab, buffers = (after[at] - before[at] for at in range(3))
        print("RESULT", cache, slab, images, pages_of_folders(), buffers, before[0] - alone[0])
    finally:
        unmount()


if __name__ == "__main__":
    main()
