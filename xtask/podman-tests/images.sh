#!/bin/sh
# Makes the images that podman's system tests expect, from programs of this host: $1 is an empty directory for their
# files. The tests' image has what podman's own build-testimage puts in: busybox, `ip` and socat, and three scripts. It
# is saved as a file; that of the registry stays in the registry's store.
set -eu
roots=$1
test=$roots/test
registry=$roots/registry

# Copies a program and the libraries that it loads.
copy() {
    program=$(command -v "$2")
    mkdir -p "$1/usr/bin"
    cp -L "$program" "$1/usr/bin/"
    ldd "$program" 2>/dev/null | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$1/$(dirname "$library")"
        cp -L "$library" "$1/$library"
    done
}

for root in "$test" "$registry"; do
    mkdir -p "$root/etc" "$root/tmp" "$root/root" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/var/tmp"
    chmod 1777 "$root/tmp" "$root/var/tmp"
    chmod 700 "$root/root"
    printf 'root:x:0:0:root:/root:/bin/sh\nbin:x:1:1:bin:/bin:/sbin/nologin\n' > "$root/etc/passwd"
    printf 'daemon:x:2:2:daemon:/sbin:/sbin/nologin\nmail:x:8:12:mail:/var/mail:/sbin/nologin\n' >> "$root/etc/passwd"
    printf 'nobody:x:65534:65534:nobody:/:/sbin/nologin\n' >> "$root/etc/passwd"
    printf 'root:x:0:root\nbin:x:1:root,bin,daemon\ndaemon:x:2:root,bin,daemon\nmail:x:12:mail\nnobody:x:65534:\n' \
        > "$root/etc/group"
done

# /bin, /sbin and /usr are separate, as in Alpine, where the tests' image comes from.
mkdir -p "$test/bin" "$test/sbin" "$test/usr/bin" "$test/usr/sbin" "$test/home/podman" "$test/var/www" "$test/var/log"
mkdir -p "$test/mnt" "$test/media" "$test/opt" "$test/srv" "$test/var/run" "$test/var/spool" "$test/usr/local/bin"
copy "$test" ip
copy "$test" ss
copy "$test" socat
# Debian's busybox lacks it.
copy "$test" printenv
cp -L "$(command -v busybox)" "$test/bin/busybox"
ldd "$test/bin/busybox" > /dev/null 2>&1 && { echo "busybox needs libraries: install busybox-static" >&2; exit 1; }
for applet in $("$test/bin/busybox" --list); do
    # The tests stop a container whose program is called `init`.
    [ -e "$test/usr/bin/$applet" ] || [ "$applet" = busybox ] || ln -s busybox "$test/bin/$applet"
done
for applet in ip ping nologin; do
    [ -e "$test/sbin/$applet" ] || ln -s ../bin/busybox "$test/sbin/$applet"
done
rm -f "$test/sbin/ip" "$test/bin/ip"
ln -s ../usr/bin/ip "$test/sbin/ip"
for applet in env id printf tail head sort wc who; do
    rm -f "$test/bin/$applet"
    ln -s ../../bin/busybox "$test/usr/bin/$applet"
done
# Alpine's package of further applets, such as httpd
ln -s busybox "$test/bin/busybox-extras"
printf 'NAME="Alpine Linux"\nID=alpine\nVERSION_ID=3.20.3\nPRETTY_NAME="as podman'\''s test image"\n' \
    > "$test/etc/os-release"
printf '3.20.3\n' > "$test/etc/alpine-release"
printf 'localhost\n' > "$test/etc/hostname"
printf '127.0.0.1\tlocalhost localhost.localdomain\n::1\tlocalhost localhost.localdomain\n' > "$test/etc/hosts"
printf 'http 80/tcp\n' > "$test/etc/services"
printf '/bin/sh\n/bin/ash\n' > "$test/etc/shells"
printf 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' > "$test/etc/profile"

# Tests start these programs by their paths, and compare the lines that they print.
cat > "$test/home/podman/pause" <<'SCRIPT'
#!/bin/sh
trap 'exit 0' TERM
echo "Confirmed: testimage pause invoked as $0"
while true; do
    sleep 1 &
    wait $!
done
SCRIPT
cat > "$test/home/podman/bytecheck" <<'SCRIPT'
#!/bin/sh
# Prints the length, the digest, and the first and last eight bytes of standard input.
all=/tmp/bytecheck.$$
cat > "$all"
in_hex() {
    od -A n -t x1 | sed 's/^ *//'
}
set -- "$(wc -c < "$all")" "$(md5sum < "$all" | cut -d ' ' -f 1)" \
    "$(head -c 8 "$all" | in_hex)" "$(tail -c 8 "$all" | in_hex)"
rm "$all"
printf 'size=%s hash=%s - head=%s tail=%s\n' "$@"
SCRIPT
chmod 755 "$test/home/podman/pause" "$test/home/podman/bytecheck"
# As in Fedora's package `filesystem`, which tests of permissions expect.
chmod 555 "$test"
# The tag of the image and this time are part of the tests.
echo 20241011 > "$test/home/podman/testimage-id"
touch --date=@1600000000 "$test/home/podman/testimage-id"

quire() {
    "$QUIRE" --store "$REGISTRY_STORE" --quiet "$@"
}
quire import "dir:$test" "$TEST_IMAGE" --change 'WORKDIR /home/podman' \
    --change 'CMD ["/bin/echo", "This container is intended for podman CI testing"]' \
    --change 'LABEL created_by=test/system/build-testimage' --change 'LABEL created_at=2024-10-11T00:00:00Z'

# 150-login.bats starts a registry in a container.
if command -v docker-registry > /dev/null; then
    copy "$registry" docker-registry
    mkdir -p "$registry/etc/docker/registry" "$registry/var/lib/registry"
    printf 'version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: /var/lib/registry\nhttp:\n  addr: :5000\n' \
        > "$registry/etc/docker/registry/config.yml"
    quire import "dir:$registry" "$REGISTRY_IMAGE" --change 'VOLUME /var/lib/registry' \
        --change 'CMD ["/usr/bin/docker-registry", "serve", "/etc/docker/registry/config.yml"]'
fi

# The first container of a boot prints a remark if the runtime lacks fixes of vulnerabilities.
quire run --rm "$TEST_IMAGE" true

# Each file of tests begins with a new store, into which the image is loaded.
quire save -o "$TEST_IMAGE_FILE" "$TEST_IMAGE"
quire rmi "$TEST_IMAGE"
chmod 644 "$TEST_IMAGE_FILE"
