# GNU tar's own formats, with long names, big numbers and old sparse files; pigz, and gzip in several members.
cd "$CONTENT"
tar -cf "$WORK/1.tar" --format=gnu --sparse --sort=name etc usr
pigz -k -p 2 -b 128 "$WORK/1.tar"
tar -cf "$WORK/2.tar" --format=oldgnu --sparse --blocking-factor=64 --label=volume srv
# Members cut anywhere, an empty one among them; the last has its name and time in its header.
cd "$WORK"
head -c 100001 2.tar | gzip -1 -n > 2.tar.gz
gzip -n < /dev/null >> 2.tar.gz
tail -c +100002 2.tar > rest && gzip -9 -N -c rest >> 2.tar.gz && rm rest
cd "$CONTENT"
# No end at all: the last entry's padding is the last there is.
tar -cf - --format=v7 --exclude=odd --blocking-factor=1 usr/lib > "$WORK/3.whole"
head -c -1024 "$WORK/3.whole" > "$WORK/3.tar" && rm "$WORK/3.whole" && gzip -k "$WORK/3.tar"
