# podman build, of the minimal system without locales: its gzip layers, and zstd:chunked ones.
mkdir "$WORK/context"
tar -C "$BASE" --exclude=./usr/share/locale --exclude=./usr/share/zoneinfo -cf "$WORK/context/base.tar" .
cp -a "$CONTENT/srv/odd" "$WORK/context/odd"
rm "$WORK/context/odd/fifo" "$WORK/context/odd/device"
cat > "$WORK/context/Containerfile" <<'FILE'
FROM scratch
ADD base.tar /
COPY odd /srv/odd
RUN rm -r /usr/share/doc/bash /etc/issue && mkdir -p /etc/issue /srv/new && echo new > /etc/issue/net && \
    ln /etc/issue/net /srv/new/link && truncate -s 1M /srv/new/hole && rm -r /usr/share/info && mkdir /usr/share/info
USER daemon
CMD ["/bin/true"]
FILE
# It refuses a longer path.
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
podman() {
    command podman --root "$WORK/root" --runroot "$run" --storage-driver=vfs --cgroup-manager=cgroupfs "$@"
}
podman build --quiet --layers --isolation=chroot -t made "$WORK/context"
rm -r "$WORK/context"
podman push --quiet --remove-signatures made "oci:$WORK/gzip:1"
skopeo copy --quiet "oci:$WORK/gzip:1" "dir:$OUT"
podman push --quiet --remove-signatures --compression-format=zstd:chunked made "oci:$WORK/chunked:1"
skopeo copy --quiet "oci:$WORK/chunked:1" "dir:$OUT-chunked"
