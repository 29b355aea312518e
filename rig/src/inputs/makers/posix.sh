# The writers of POSIX: pax and cpio, and bsdtar's restricted PAX; cpio's blocks end where the data does.
cd "$CONTENT"
find etc usr/sbin usr/share/zoneinfo | sort | pax -w -x ustar -b 5120 > "$WORK/1.tar"
gzip -k -1 "$WORK/1.tar"
find usr/lib usr/share/doc -print | sort | cpio --quiet -o -H ustar > "$WORK/2.tar"
zstd -q -3 -k "$WORK/2.tar"
bsdtar -cf "$WORK/3.tar" --format=pax --xattrs --acls --read-sparse srv
gzip -k "$WORK/3.tar"
bsdtar -cf "$WORK/4.tar" --format=gnutar srv/odd/deep
