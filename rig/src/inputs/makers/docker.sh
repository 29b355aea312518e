# A daemon of its own with both of its builders, pushed and saved. Networks are left out, since nothing needs one.
state=$WORK/state
mkdir -p "$state" "$WORK/context"
export DOCKER_HOST="unix://$state/socket" DOCKER_CONFIG="$state/config" DOCKER_BUILDKIT=0
dockerd --iptables=false --ip6tables=false --bridge=none --storage-driver=vfs --data-root="$state/data" \
    --exec-root="$state/exec" --pidfile="$state/pid" --host="$DOCKER_HOST" --cgroup-parent=quire-makers \
    > "$state/log" 2>&1 &
tar -C "$BASE" --exclude=./usr/share/locale --exclude=./usr/share/zoneinfo -cf "$WORK/context/base.tar" .
cp -a "$CONTENT/srv/odd" "$WORK/context/odd"
rm "$WORK/context/odd/fifo" "$WORK/context/odd/device"
cat > "$WORK/context/Dockerfile" <<'FILE'
FROM scratch
ADD base.tar /
COPY odd /srv/odd
RUN rm -r /usr/share/doc/bash /etc/issue && mkdir -p /etc/issue /srv/new && echo new > /etc/issue/net && \
    ln /etc/issue/net /srv/new/link && truncate -s 1M /srv/new/hole && rm -r /usr/share/info && mkdir /usr/share/info
USER daemon
CMD ["/bin/true"]
FILE
tries=0
until docker version > /dev/null 2>&1; do
    tries=$((tries + 1))
    if [ $tries -gt 100 ]; then
        tail -n 3 "$state/log" >&2
        exit 1
    fi
    sleep 0.2
done
docker build --quiet --network=none -t "$REGISTRY/docker:1" "$WORK/context"
docker push --quiet "$REGISTRY/docker:1"
# BuildKit writes tars by other code. Debian's own client can drive it without a plugin.
client=docker
if [ -x /usr/bin/docker ]; then client=/usr/bin/docker; fi
DOCKER_BUILDKIT=1 $client build --quiet --network=none -t "$REGISTRY/buildkit:1" "$WORK/context"
docker push --quiet "$REGISTRY/buildkit:1"
docker save -o "$WORK/saved.tar" "$REGISTRY/docker:1"
kill "$(cat "$state/pid")"
wait
find /sys/fs/cgroup -depth -type d -path '*/quire-makers*' -exec rmdir {} \; 2>/dev/null || true
skopeo copy --quiet --src-tls-verify=false "docker://$REGISTRY/docker:1" "dir:$OUT"
skopeo copy --quiet --src-tls-verify=false "docker://$REGISTRY/buildkit:1" "dir:$OUT-buildkit"
skopeo copy --quiet "docker-archive:$WORK/saved.tar" "dir:$OUT-saved"
