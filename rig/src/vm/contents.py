"""What a layout's layers come to, by another reader than ours and by the rules of the specification of OCI images.

Arguments: the layout, and two files to write: a line for each path as `find -printf` of disk.rs prints it, sorted, and the
digests of all files as sha256sum(1) wants them.
"""
import hashlib
import json
import os
import sys
import tarfile
from collections import Counter

layout, files, digests = sys.argv[1:]


def blob(digest):
    return os.path.join(layout, "blobs", *digest.split(":"))


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


manifest = load(blob(load(os.path.join(layout, "index.json"))["manifests"][0]["digest"]))
# By path: what the tar says of it, and its content's digest. Hard links are one such pair.
tree = {}


def remove(path, and_itself):
    for other in [it for it in tree if it.startswith(path + "/") or (and_itself and it == path)]:
        del tree[other]


for layer in manifest["layers"]:
    with tarfile.open(blob(layer["digest"])) as tar:
        members = [(os.path.normpath(it.name), it) for it in tar]
        # Deletions are of what lower layers have.
        for path, _ in members:
            folder, name = os.path.split(path)
            if name == ".wh..wh..opq":
                remove(folder, False)
            elif name.startswith(".wh."):
                remove(os.path.join(folder, name[4:]), True)
        for path, member in members:
            if os.path.basename(path).startswith(".wh."):
                continue
            if not member.isdir() and path in tree and tree[path][0].isdir():
                remove(path, True)
            if member.islnk():
                tree[path] = tree[os.path.normpath(member.linkname)]
                continue
            digest = None
            if member.isreg():
                digest = hashlib.sha256(tar.extractfile(member).read()).hexdigest()
            tree[path] = (member, digest)


links = Counter(id(member) for member, _ in tree.values())


def time(member):
    seconds, _, fraction = member.pax_headers.get("mtime", str(int(member.mtime))).partition(".")
    # As many digits as find(1) has.
    return f"{seconds}.{fraction:0<10}"


def line(path, member):
    name = path if path == "." else "./" + path
    common = f"{member.mode:o} {member.uid} {member.gid} {time(member)} {name}"
    if member.isdir():
        return f"d {common}"
    count = links[id(member)]
    if member.issym():
        return f"l {count} {common} -> {member.linkname}"
    if member.isreg():
        return f"f {count} {member.size} {common}"
    return f"{'c' if member.ischr() else 'b' if member.isblk() else 'p'} {count} {common}"


with open(files, "w", encoding="utf-8") as file:
    for text in sorted(line(path, member) for path, (member, _) in tree.items()):
        print(text, file=file)
with open(digests, "w", encoding="utf-8") as file:
    for path, (_, digest) in sorted(tree.items()):
        if digest is not None:
            print(f"{digest}  ./{path}", file=file)
