# Writes images of two layers as archives of OCI layouts into the folder argv[1], and prints the name of each and the chain
# id of its upper layer, which is the name of engines' snapshots.
import hashlib
import io
import json
import sys
import tarfile

BASE = [("etc/g", "old"), ("usr/lib/old", "o")]
LINK = ("lib", "->usr/lib")
IMAGES = {
    "link": ([LINK], [("lib/foo", "n")]),
    "root": ([("x", "->/")], [("x/etc/g", "new")]),
    "whiteout": ([LINK], [("lib/.wh.old", "")]),
    "opaque": ([LINK], [("lib/.wh..wh..opq", ""), ("lib/foo", "n")]),
    "hard-link": ([LINK], [("lib/foo", "=etc/g")]),
    "both": ([], [("q", "n"), (".wh.q", "")]),
    "file": ([("a", "file")], [("a/b", "n")]),
    "dangling": ([("a", "->nowhere")], [("a/b", "n")]),
}


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    data = b""
    if content.startswith(b"->"):
        info.type, info.linkname = tarfile.SYMTYPE, content[2:].decode()
    elif content.startswith(b"="):
        info.type, info.linkname = tarfile.LNKTYPE, content[1:].decode()
    else:
        data, info.size = content, len(content)
    archive.addfile(info, io.BytesIO(data))


def layer(entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in entries:
            add(archive, name, content.encode())
    return out.getvalue()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


for name, (lower, upper) in IMAGES.items():
    with tarfile.open(f"{sys.argv[1]}/{name}.tar", "w") as out:

        def blob(kind, data):
            add(out, "blobs/" + digest(data).replace(":", "/"), data)
            media_type = "application/vnd.oci.image." + kind
            return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

        layers = [blob("layer.v1.tar", layer(it)) for it in (BASE + lower, upper)]
        ids = [it["digest"] for it in layers]
        config = {"architecture": "amd64", "os": "linux", "config": {}}
        config["rootfs"] = {"type": "layers", "diff_ids": ids}
        manifest = {"schemaVersion": 2, "layers": layers}
        manifest["config"] = blob("config.v1+json", json.dumps(config).encode())
        entry = blob("manifest.v1+json", json.dumps(manifest).encode())
        entry["annotations"] = {"io.containerd.image.name": f"example.org/{name}:1"}
        add(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        add(out, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    print(name, digest(" ".join(ids).encode()))
