"""What a program sees of a file system: one line for each behaviour. Run in a tree that `tree` has made.

    semantics.py tree DIR    makes the tree
    semantics.py ask DIR     changes it, and says what happened
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import subprocess
import sys

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def read(path):
    with open(path) as file:
        return file.read()


def tree(top):
    os.chdir(top)
    for name in ["dir", "dir/sub", "gone", "gone/deep", "moved", "moved/in", "full", "watched"]:
        os.mkdir(name)
    for name in [
        "a", "appended", "truncated", "renamed", "over", "swapped", "linked", "removed", "replaced", "mapped", "private",
        "owned", "timed", "locked", "held", "kept", "dir/file", "dir/sub/file", "gone/file", "gone/deep/file", "moved/file",
        "moved/in/file", "full/file", "watched/file", "watched/other", "xattrs", "punched", "program-data",
    ]:
        write(name, name * 100)
    os.link("linked", "linked2")
    os.symlink("dir/file", "link")
    os.mkfifo("fifo")
    os.setxattr("xattrs", "user.old", b"1")
    write("program", "#!/bin/sh\necho old\n")
    os.chmod("program", 0o755)
    os.chmod("dir", 0o2775)
    for number in range(50):
        write(f"full/{number}", "x")


RENAME_NOREPLACE, RENAME_EXCHANGE, AT_FDCWD = 1, 2, -100
FALLOC_KEEP, FALLOC_PUNCH = 1, 2


def rename2(old, new, flags):
    call("renameat2", AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), flags)


def fallocate(fd, mode, offset, length):
    call("fallocate", fd, mode, ctypes.c_long(offset), ctypes.c_long(length))


def checks():
    def check(function):
        cases.append(function)

    cases = []

    @check
    def write_and_read():
        write("a", "new")
        return read("a")

    @check
    def append():
        with open("appended", "a") as file:
            file.write("tail")
        return len(read("appended")), read("appended")[-6:]

    @check
    def truncate():
        os.truncate("truncated", 5)
        return read("truncated")

    @check
    def truncate_up():
        os.truncate("truncated", 50)
        return read("truncated").encode()

    @check
    def rename_file():
        before = os.stat("renamed").st_ino
        os.rename("renamed", "dir/renamed")
        return os.path.exists("renamed"), len(read("dir/renamed")), os.stat("dir/renamed").st_ino == before

    @check
    def rename_over():
        os.rename("over", "a")
        return read("a")[:4], os.path.exists("over")

    @check
    def rename_no_replace():
        rename2("appended", "a", RENAME_NOREPLACE)

    @check
    def rename_exchange():
        rename2("swapped", "truncated", RENAME_EXCHANGE)
        return read("swapped")[:5], read("truncated")[:5]

    @check
    def rename_directory():
        os.rename("moved", "elsewhere")
        return sorted(os.listdir("elsewhere")), read("elsewhere/in/file")[:8], os.path.exists("moved")

    @check
    def rename_directory_onto_full_one():
        os.rename("elsewhere", "full")

    @check
    def rename_directory_into_itself():
        os.rename("dir", "dir/sub/dir")

    @check
    def rename_over_whiteout():
        os.remove("replaced")
        os.rename("kept", "replaced")
        return read("replaced")[:4]

    @check
    def link():
        os.link("a", "dir/hard")
        write("dir/hard", "both")
        return read("a"), os.stat("a").st_nlink, os.path.samefile("a", "dir/hard")

    @check
    def link_of_the_image():
        before = os.stat("linked").st_nlink
        os.link("linked", "linked3")
        return before, os.path.samefile("linked", "linked3")

    @check
    def links_of_the_image_stay_together():
        write("linked", "changed")
        return read("linked2")[:7]

    @check
    def link_over_existing():
        os.link("a", "appended")

    @check
    def unlink():
        os.remove("removed")
        return os.path.exists("removed"), "removed" in os.listdir(".")

    @check
    def unlink_twice():
        os.remove("removed")

    @check
    def create_where_removed():
        write("removed", "again")
        return read("removed")

    @check
    def exclusive_create():
        os.close(os.open("a", os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    @check
    def directory_where_file_was():
        os.remove("removed")
        os.mkdir("removed")
        write("removed/in", "1")
        return os.listdir("removed")

    @check
    def rmdir_full():
        os.rmdir("gone")

    @check
    def remove_tree_and_make_again():
        for name in ["gone/deep/file", "gone/file"]:
            os.remove(name)
        os.rmdir("gone/deep")
        os.rmdir("gone")
        os.mkdir("gone")
        return os.listdir("gone")

    @check
    def remove_while_reading():
        names = []
        for entry in os.scandir("full"):
            os.remove(entry.path)
            names.append(entry.name)
        return len(names), len(set(names)), os.listdir("full")

    @check
    def open_file_outlives_its_name():
        with open("held") as file:
            os.remove("held")
            return len(file.read()), os.fstat(file.fileno()).st_nlink

    @check
    def reader_from_before_sees_a_write():
        with open("locked") as file:
            with open("locked", "r+") as writer:
                writer.write("W")
            return file.read(1)

    @check
    def inode_number_stays():
        before = os.stat("owned").st_ino
        os.chmod("owned", 0o600)
        return os.stat("owned").st_ino == before

    @check
    def owner_and_mode():
        os.chown("owned", 12, 34)
        found = os.stat("owned")
        return found.st_uid, found.st_gid, oct(found.st_mode), len(read("owned"))

    @check
    def set_id_bits_go_with_the_owner():
        os.chmod("owned", 0o6755)
        os.chown("owned", 1, 1)
        return oct(os.stat("owned").st_mode)

    @check
    def inherited_group():
        os.mkdir("dir/new")
        return oct(os.stat("dir/new").st_mode)

    @check
    def times():
        os.utime("timed", ns=(1_000_000_007, 2_000_000_009))
        found = os.stat("timed")
        return found.st_atime_ns, found.st_mtime_ns

    @check
    def xattrs():
        os.setxattr("xattrs", "user.new", b"2")
        return sorted(os.listxattr("xattrs")), os.getxattr("xattrs", "user.old")

    @check
    def xattr_removed():
        os.removexattr("xattrs", "user.old")
        return sorted(os.listxattr("xattrs"))

    @check
    def xattr_flags():
        os.setxattr("xattrs", "user.new", b"3", os.XATTR_CREATE)

    @check
    def trusted_xattr():
        os.setxattr("xattrs", "trusted.mine", b"4")
        return os.getxattr("xattrs", "trusted.mine")

    @check
    def xattr_of_directory():
        os.setxattr("dir", "user.d", b"5")
        return os.getxattr("dir", "user.d"), read("dir/file")[:3]

    @check
    def acl():
        # Source: Linux include/uapi/linux/posix_acl_xattr.h: version 2, then tag, permissions, id.
        none = 0xFFFFFFFF
        entries = [(1, 6, none), (2, 4, 7), (4, 4, none), (16, 4, none), (32, 0, none)]
        text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr("xattrs", "system.posix_acl_access", text)
        return os.getxattr("xattrs", "system.posix_acl_access") == text, oct(os.stat("xattrs").st_mode)

    @check
    def shared_mapping():
        with open("mapped", "r+b") as file:
            with mmap.mmap(file.fileno(), 0) as area:
                area[0:4] = b"MMAP"
                seen = read("mapped")[:6]
                area.flush()
        return seen, read("mapped")[:6]

    @check
    def private_mapping():
        with open("private", "rb") as file:
            with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as area:
                area[0:4] = b"MMAP"
                return area[0:6], read("private")[:6]

    @check
    def unnamed_file():
        fd = os.open("dir", os.O_TMPFILE | os.O_RDWR, 0o640)
        os.write(fd, b"unnamed")
        os.link(f"/proc/self/fd/{fd}", "named", follow_symlinks=True)
        os.close(fd)
        return read("named"), oct(os.stat("named").st_mode)

    @check
    def allocate():
        with open("allocated", "wb") as file:
            fallocate(file.fileno(), 0, 0, 1 << 20)
            found = os.fstat(file.fileno())
            return found.st_size, found.st_blocks * 512 >= 1 << 20

    @check
    def allocate_behind_the_end():
        with open("allocated", "r+b") as file:
            fallocate(file.fileno(), FALLOC_KEEP, 1 << 20, 1 << 20)
            return os.fstat(file.fileno()).st_size

    @check
    def punch():
        with open("punched", "wb") as file:
            file.write(b"x" * (1 << 20))
            file.flush()
            fallocate(file.fileno(), FALLOC_KEEP | FALLOC_PUNCH, 4096, 1 << 19)
        with open("punched", "rb") as file:
            content = file.read()
        return content[4095], sum(content[4096:4096 + (1 << 19)]), content[4096 + (1 << 19)], len(content)

    @check
    def punch_in_a_file_of_the_image():
        with open("program-data", "r+b") as file:
            fallocate(file.fileno(), FALLOC_KEEP | FALLOC_PUNCH, 0, 4096)
        return read("program-data").encode()[:3]

    @check
    def hole():
        with open("sparse", "wb") as file:
            file.truncate(1 << 20)
            file.seek(1 << 19)
            file.write(b"data")
        fd = os.open("sparse", os.O_RDONLY)
        found = os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 1 << 19, os.SEEK_HOLE)
        os.close(fd)
        return found

    @check
    def run_a_changed_program():
        before = subprocess.run(["./program"], capture_output=True).stdout
        with open("program", "w") as file:
            file.write("#!/bin/sh\necho new\n")
        return before, subprocess.run(["./program"], capture_output=True).stdout

    @check
    def run_while_it_is_written():
        with open("binary", "wb") as file, open("/bin/true", "rb") as true:
            file.write(true.read())
            os.fchmod(file.fileno(), 0o755)
            file.flush()
            subprocess.run(["./binary"])

    @check
    def write_while_it_runs():
        with subprocess.Popen(["/bin/cp", "/bin/sleep", "sleeper"]) as copy:
            copy.wait()
        child = subprocess.Popen(["./sleeper", "5"])
        try:
            open("sleeper", "r+b").close()
        finally:
            child.kill()
            child.wait()

    @check
    def notices():
        # Source: inotify(7).
        fd = libc.inotify_init1(os.O_NONBLOCK)
        call("inotify_add_watch", fd, b"watched", 0x100 | 0x200 | 0x40 | 0x80 | 0x2)
        write("watched/new", "1")
        os.rename("watched/new", "watched/newer")
        os.remove("watched/file")
        with open("watched/other", "a") as file:
            file.write("1")
        events, at = os.read(fd, 65536), 0
        found = []
        while at < len(events):
            _, mask, _, length = struct.unpack_from("iIII", events, at)
            name = events[at + 16:at + 16 + length].rstrip(b"\0").decode()
            found.append((hex(mask), name))
            at += 16 + length
        os.close(fd)
        return found

    @check
    def locks():
        with open("locked", "r+") as one, open("locked", "r+") as two:
            fcntl.flock(one, fcntl.LOCK_EX)
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @check
    def symbolic_link():
        os.symlink("a", "dir/link")
        write("link", "through")
        return os.readlink("dir/link"), read("dir/file")

    @check
    def fifo():
        os.mkfifo("dir/fifo")
        os.rename("fifo", "dir/fifo2")
        return stat.S_ISFIFO(os.stat("dir/fifo").st_mode), stat.S_ISFIFO(os.stat("dir/fifo2").st_mode)

    @check
    def device():
        os.mknod("null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        with open("null", "wb") as file:
            return file.write(b"away"), os.stat("null").st_rdev == os.makedev(1, 3)

    @check
    def long_name():
        write("n" * 255, "1")
        write("n" * 256, "1")

    @check
    def sync():
        with open("a", "r+") as file:
            os.fsync(file.fileno())
        os.sync()
        return read("a")

    @check
    def directory_links():
        return os.stat("dir/sub").st_nlink >= 1, sorted(os.listdir("dir/sub"))

    return cases


def ask(top):
    os.chdir(top)
    os.umask(0o022)
    for case in checks():
        try:
            outcome = case()
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        print(f"{case.__name__}: {outcome}")


{"tree": tree, "ask": ask}[sys.argv[1]](sys.argv[2])
