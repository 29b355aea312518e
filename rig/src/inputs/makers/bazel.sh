# As rules of Bazel write layers: sorted, without times and owners; Python's tarfile in two formats, bsdtar from an mtree.
python3 - "$CONTENT" "$WORK" <<'PYTHON'
import gzip, os, sys, tarfile

content, work = (os.fsencode(it) for it in sys.argv[1:])

def paths(top):
    for folder, folders, files in os.walk(os.path.join(content, top)):
        folders.sort()
        # Links to folders count as folders here.
        for name in sorted(folders + files):
            yield os.path.join(folder, name)

def write(name, form, top):
    path = os.fsdecode(os.path.join(work, name))
    with tarfile.open(path, "w", format=form, errors="surrogateescape") as tar:
        for path_in in paths(top):
            inside = os.fsdecode(b"./" + os.path.relpath(path_in, content))
            info = tar.gettarinfo(os.fsdecode(path_in), arcname=inside)
            info.mtime = 0
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.isreg():
                with open(path_in, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    # Bazel's packers leave name and time out of the header, so that equal layers are equal files.
    with open(path, "rb") as tar, open(path + ".gz", "wb") as raw:
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
            packed.write(tar.read())

write(b"1.tar", tarfile.GNU_FORMAT, b"usr")
write(b"2.tar", tarfile.PAX_FORMAT, b"srv")
PYTHON
cd "$CONTENT"
bsdtar -cf - --format=mtree --options='!all,type,mode,link' etc usr/share/zoneinfo |
    sed -e 's/ type=/ uid=0 gid=0 time=0.0 type=/' > "$WORK/manifest"
bsdtar -cf "$WORK/3.tar" --format=pax "@$WORK/manifest"
zstd -q --rm -k -19 "$WORK/3.tar"
rm "$WORK/manifest"
