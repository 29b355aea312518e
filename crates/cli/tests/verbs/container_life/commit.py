"""What containers change, seen by somebody else than Quire.

    commit.py tree DIR            makes the tree of an image
    commit.py change DIR [mapped] changes it in every way, and
    commit.py again DIR           once more, what was changed before
    commit.py walk DIR [NAME...]  prints all that can be seen of a tree, but for NAME
    commit.py apply TAR DIR       applies a layer to a tree, by the words of the OCI image specification
    commit.py hide TAR DIR        applies only what it removes
    commit.py socket PATH         makes a socket
    commit.py nest DIR N NAME     makes N directories, one in the other
    commit.py unnest DIR NAME     removes them
"""

import hashlib
import os
import shutil
import socket
import stat
import struct
import sys
import tarfile


def write(path, text, mode=0o644, mtime=1_000_000_000_123_456_789):
    with open(path, "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    os.chmod(path, mode)
    os.utime(path, ns=(mtime, mtime))


def acl(user):
    """user::rw-, user:USER:r--, group::r--, mask::r--, other::---"""
    entries = [(1, 6, 2**32 - 1), (2, 4, user), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


# cap_net_bind_service+ep, without a root of its own. Source: linux/capability.h, struct vfs_cap_data.
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)


def tree(top):
    os.chdir(top)
    for name in ["deep", "gone", "filled", "opaque", "moved", "twice", "into", "swap1", "swap2", "replaced", "kept",
                 "merged", "links", "renamed", "same"]:
        os.makedirs(f"{name}/sub/leaf")
        write(f"{name}/file", f"file of {name}\n" * 20, 0o640)
        write(f"{name}/short", name)
        write(f"{name}/sub/leaf/far", "far " * 100)
    write("moved/one", "linked " * 50)
    os.link("moved/one", "moved/sub/two")
    write("links/a", "linked too " * 50)
    os.link("links/a", "links/b")
    os.setxattr("moved/file", "user.kept", b"as it was")
    os.setxattr("moved/sub", "user.directory", b"\0\1")
    write("capable", "cap " * 30, 0o755)
    os.setxattr("capable", "security.capability", CAPABILITY)
    write("listed", "acl " * 30)
    os.setxattr("listed", "system.posix_acl_access", acl(70_007))
    for at in range(12):
        write(f"plain{at}", f"plain {at} " * 30)
    write("empty", "")
    # With what says that it is removed, this name is longer than names may be.
    write("filled/" + "n" * 255, "long")
    os.symlink("plain0", "link")
    os.symlink("nowhere", "moved/link")
    os.mkfifo("pipe")
    os.mknod("null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for path in ["moved/sub", "kept"]:
        os.utime(path, ns=(5_000_000_007, 5_000_000_007))


def change(top, *mapped):
    os.chdir(top)
    # Metadata alone, of files and of the root.
    os.chmod("plain1", 0o4711)
    os.chown("plain2", 12, 34)
    os.utime("plain3", ns=(7, 123_000_000_456))
    os.setxattr("plain4", "user.new", b"x\0y")
    # Overlayfs sets no ACL on a file that is still the image's, since EROFS could not.
    os.chmod("plain5", 0o640)
    os.setxattr("plain5", "system.posix_acl_access", acl(65_000))
    os.chmod("empty", 0o600)
    os.chmod("kept/short", 0o400)
    os.chown("capable", 5, 6)
    os.setxattr("capable", "security.capability", CAPABILITY)
    os.chmod("listed", 0o600)
    os.chown("link", 3, 4, follow_symlinks=False)
    os.chmod("pipe", 0o622)
    os.setxattr("kept", "user.of_directory", b"1")
    os.setxattr("kept", "system.posix_acl_default", acl(70_009))
    # Content.
    with open("plain6", "ab") as file:
        file.write(b"more")
    os.truncate("plain7", 10)
    write("new", "new")
    write("large", b"0123456789abcdef" * (3 << 16))
    with open("sparse", "wb") as file:
        file.truncate(9 << 20)
        file.seek(5 << 20)
        file.write(b"data")
    write("all_hole", "")
    os.truncate("all_hole", 5 << 20)
    # Names.
    for name in ["naïve", "a\nb", "tab\tand \\ and \"", "-dash", "." * 3, "ab" * 127]:
        write(name, name)
    write(b"\xff\xfe not UTF-8", b"x")
    os.makedirs("/".join(["d" * 30] * 5))
    write("/".join(["d" * 30] * 5) + "/" + "f" * 90, "deep")
    os.symlink("s" * 300, "long_link")
    os.symlink(b"\xff\n", "odd_link")
    # Types.
    for name, kind, number in [("c", stat.S_IFCHR, (5, 1)), ("b", stat.S_IFBLK, (259, 70_000)), ("f", stat.S_IFIFO, (0, 0))]:
        # Root of a user namespace makes no devices.
        if not mapped or name == "f":
            os.mknod(name, kind | 0o640, os.makedev(*number))
    os.mkdir("empty_directory", 0o1777)
    os.mkdir("set_id", 0o755)
    os.chmod("set_id", 0o2750)
    # Removed, replaced, made anew.
    os.remove("plain8")
    shutil.rmtree("gone")
    shutil.rmtree("opaque")
    os.mkdir("opaque")
    write("opaque/only", "only this")
    os.mkdir("opaque/sub")
    shutil.rmtree("replaced")
    write("replaced", "a file now")
    os.remove("plain9")
    os.mkdir("plain9")
    write("plain9/inside", "a directory now")
    os.remove("filled/file")
    os.remove("filled/" + "n" * 255)
    shutil.rmtree("filled/sub")
    os.symlink("elsewhere", "filled/sub")
    # Hard links, made and broken.
    os.link("plain10", "another")
    os.link("another", "kept/third")
    with open("links/a", "ab") as file:
        file.write(b"apart")
    os.link("new", "same/new")
    os.link("f", "f2")
    # Renamed: files with metadata of their own, directories twice, into each other, over what was there.
    os.chmod("plain11", 0o611)
    os.rename("plain11", "into/moved_file")
    os.chmod("into/short", 0o644)
    os.rename("into/short", "into/renamed_here")
    os.rename("moved", "deep/moved")
    os.remove("deep/moved/short")
    os.chmod("deep/moved/file", 0o604)
    os.remove("deep/moved/sub/leaf/far")
    write("deep/moved/sub/added", "added")
    os.rename("twice", "once")
    os.rename("once", "thrice")
    write("thrice/sub/leaf/added", "added")
    os.rename("into", "thrice/into")
    os.rename("thrice", "kept/thrice")
    os.rename("swap1", "swap")
    os.rename("swap2", "swap1")
    os.rename("swap", "swap2")
    os.rename("renamed/sub", "renamed/bus")
    os.chmod("renamed/bus/leaf", 0o700)
    os.rename("merged/sub/leaf", "merged/leaf")
    shutil.rmtree("merged/sub")
    os.mkdir("merged/sub")
    write("merged/sub/file", "in a new one")
    os.rename("same", "other")
    os.rename("other", "same")
    os.utime("kept", ns=(11, 22_000_000_033))
    os.chown(".", 1, 2)
    os.chmod(".", 0o751)
    os.setxattr(".", "user.root", b"of the root")
    os.utime(".", ns=(1, 1_700_000_000_987_654_321))


def again(top):
    os.chdir(top)
    os.rename("deep/moved", "back")
    os.chmod("back/file", 0o666)
    os.rename("kept/thrice/into", "into")
    os.remove("into/file")
    os.mkdir("gone")
    write("gone/new", "here again")
    shutil.rmtree("opaque")
    os.rename("back", "opaque")
    os.remove("another")
    os.chmod("kept/third", 0o600)
    os.remove("new")
    os.utime(".", ns=(1, 1_800_000_000_000_000_001))


def digest(path):
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def walk(top, skipped):
    lines = []
    links = {}
    skipped = {b"./" + os.fsencode(name) for name in skipped}

    def show(path):
        if path in skipped:
            return
        found = os.lstat(path)
        words = [path, stat.filemode(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns]
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFREG:
            words += [found.st_size, digest(path)]
        elif kind == stat.S_IFLNK:
            words.append(os.readlink(path))
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            words.append((os.major(found.st_rdev), os.minor(found.st_rdev)))
        for xattr in sorted(os.listxattr(path, follow_symlinks=False)):
            words.append((xattr, os.getxattr(path, xattr, follow_symlinks=False)))
        group = links.setdefault((found.st_dev, found.st_ino), [])
        group.append(path)
        lines.append((words, group))
        if kind == stat.S_IFDIR:
            for inner in sorted(os.listdir(path)):
                show(os.path.join(path, inner))

    # The root of a process is a link.
    os.chdir(top)
    show(b".")
    for words, group in lines:
        print(*words, *(["one of", *group] if len(group) > 1 else []))


def clear(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def hide(tar, top):
    """Whiteouts hide what was there before, wherever they stand in the layer."""

    with tarfile.open(tar) as layer:
        members = layer.getmembers()
    for member in members:
        folder, name = os.path.split(os.path.join(top, member.name))
        if name == ".wh..wh..opq":
            for inner in os.listdir(folder) if os.path.isdir(folder) else []:
                clear(os.path.join(folder, inner))
        elif name.startswith(".wh."):
            clear(os.path.join(folder, name[4:]))
        elif not member.isdir() and os.path.isdir(os.path.join(folder, name)):
            # GNU tar would do this only with directories that the layer goes on with, too.
            clear(os.path.join(folder, name))


def apply(tar, top):
    hide(tar, top)
    directories = []
    with tarfile.open(tar) as layer:
        for member in layer:
            path = os.path.normpath(os.path.join(top, member.name))
            if os.path.basename(path).startswith(".wh."):
                continue
            if not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
                clear(path)
            if member.islnk():
                os.link(os.path.join(top, member.linkname), path, follow_symlinks=False)
                continue
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif member.issym():
                os.symlink(member.linkname, path)
            elif member.isfile():
                with layer.extractfile(member) as source, open(path, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            else:
                kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK if member.isblk() else stat.S_IFIFO
                number = os.makedev(member.devmajor, member.devminor) if kind != stat.S_IFIFO else 0
                os.mknod(path, kind | 0o600, number)
            # Those of a directory that was there, and ACLs that a new file gets from the one above.
            for xattr in os.listxattr(path, follow_symlinks=False):
                os.removexattr(path, xattr, follow_symlinks=False)
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
            if not member.issym():
                os.chmod(path, member.mode)
            for key, value in member.pax_headers.items():
                value = value.encode("utf-8", "surrogateescape")
                if key.startswith("SCHILY.xattr."):
                    name = key[len("SCHILY.xattr."):]
                    os.setxattr(path, name, value, follow_symlinks=False)
                elif key.startswith("SCHILY.acl."):
                    kind = key[len("SCHILY.acl."):]
                    os.setxattr(path, f"system.posix_acl_{kind}", parse_acl(value.decode()))
            seconds, _, fraction = member.pax_headers.get("mtime", str(int(member.mtime))).partition(".")
            time = int(seconds) * 10**9 + int((fraction + "000000000")[:9])
            if member.isdir():
                directories.append((path, time))
            else:
                os.utime(path, ns=(time, time), follow_symlinks=False)
    for path, time in reversed(directories):
        os.utime(path, ns=(time, time))


def parse_acl(text):
    tags = {("user", ""): 1, ("user", "x"): 2, ("group", ""): 4, ("group", "x"): 8, ("mask", ""): 16, ("other", ""): 32}
    value = struct.pack("<I", 2)
    for entry in text.split(","):
        kind, who, bits = entry.split(":")
        number = sum(bit for letter, bit in zip(bits, [4, 2, 1]) if letter != "-")
        value += struct.pack("<HHI", tags[kind, "x" if who else ""], number, int(who) if who else 2**32 - 1)
    return value


what, *arguments = sys.argv[1:]
if what == "walk":
    walk(arguments[0], arguments[1:])
elif what == "socket":
    os.chdir(os.path.dirname(arguments[0]))
    socket.socket(socket.AF_UNIX).bind(os.path.basename(arguments[0]))
elif what == "nest":
    # No path names all of it.
    os.chdir(arguments[0])
    for _ in range(int(arguments[1])):
        os.mkdir(arguments[2])
        os.chdir(arguments[2])
elif what == "unnest":
    os.chdir(arguments[0])
    shutil.rmtree(arguments[1])
else:
    {"tree": tree, "change": change, "again": again, "apply": apply, "hide": hide}[what](*arguments)
