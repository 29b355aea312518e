# $CONTENT: a part of Debian's minimal system, and beside it what tars have trouble with.
mkdir -p "$CONTENT"
cd "$BASE"
cp -a --parents etc usr/sbin usr/share/doc usr/share/zoneinfo usr/lib/*/perl-base "$CONTENT"
mkdir -p "$CONTENT/srv/odd"
cd "$CONTENT/srv/odd"
deep=deep
for letter in a b c; do
    # Beyond the 100 bytes of a header's name, then beyond the 155 of its prefix too.
    deep=$deep/$(printf "%0100d" 0 | tr 0 $letter)
done
mkdir -p "$deep"
head -c 3000 /dev/zero > "$deep/zeros"
ln -s "$(printf "%0180d" 0 | tr 0 t)" long-target
ln "$deep/zeros" "$(printf "%0150d" 0 | tr 0 h)"
touch -d "1965-03-04 05:06:07.25 UTC" before-1970
touch -d "2300-01-01 00:00:00 UTC" after-2242
touch -d "2024-02-29 12:00:00.123456789 UTC" fraction
echo owned > big-owner && chown 3000000:2999999 big-owner
echo setuid > setuid && chmod 6755 setuid
echo data > "$(printf 'latin-\351')"
echo data > 'größe – 大きさ'
echo data > "$(printf 'line\nbreak')"
mkfifo fifo
mknod device b 7 300
for size in 1 511 512 513 1023 1024 4095 4096 4097 65537; do
    head -c $size /usr/bin/bash > size-$size 2>/dev/null
done
# Sparse files: a hole first, a hole last, nothing but a hole, and more pieces than the first header has place for.
truncate -s 300K hole && printf end >> hole
head -c 5000 /usr/bin/bash > tail && truncate -s 2M tail
truncate -s 1M nothing
for at in 0 3 6 9 12 15 18 21 24 27 30 33 36 39 42; do
    printf piece$at | dd of=pieces bs=64K seek=$at conv=notrunc status=none
done
setfattr -n user.text -v "a value" fraction
setfattr -n user.binary -v 0x00ff3d0a size-1
setfattr -n trusted.folder -v "" .
setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 size-512
setfacl -m user:1234:r,group:5678:rw size-513
setfacl -d -m user:1234:rx .
