# buildah, step by step, into Docker's manifest; skopeo packs it again, by zstd.
cd "$WORK"
buildah() {
    command buildah --root "$WORK/root" --runroot "$WORK/run" --storage-driver=vfs "$@"
}
one=$(buildah from scratch)
buildah copy --quiet "$one" "$CONTENT/usr" /usr
buildah copy --quiet "$one" "$CONTENT/etc" /etc
first=$(buildah commit --quiet --format=docker "$one")
two=$(buildah from "$first")
root=$(buildah mount "$two")
rm -r "$root/usr/share/zoneinfo"
chmod 750 "$root/etc"
cp -a "$CONTENT/srv" "$root"
# Its rewriting of times does not expect headers to become shorter by that.
rm "$root/srv/odd/before-1970" "$root/srv/odd/after-2242"
buildah umount "$two" > /dev/null
buildah config --cmd /bin/true --label maker=buildah "$two"
last=$(buildah commit --quiet --format=docker --timestamp 1700000000 "$two")
buildah push --quiet --format=v2s2 "$last" "dir:$OUT"
buildah push --quiet --format=oci "$last" "oci:$WORK/oci:1"
skopeo copy --quiet --dest-compress-format=zstd "oci:$WORK/oci:1" "oci:$WORK/zstd:1"
skopeo copy --quiet "oci:$WORK/zstd:1" "dir:$OUT-zstd"
