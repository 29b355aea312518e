#!/bin/sh
# One step of the test on Debian's kernel for arm64; $1 names the step. Later steps use what earlier ones made. A check
# that fails ends the step with an error.
set -eu
mkdir -p /var/tmp/quire
cd /var/tmp/quire

quire() { command quire --store "$PWD/store" "$@"; }

fail() {
    echo "FAILED: $*"
    exit 1
}

# $1 names the value, $2 is what it must be, and $3 what it is.
same() { [ "$2" = "$3" ] || fail "$1 is '$3', not '$2'"; }

# A command that must fail. $1 is the exit code, and $2 a part of the output.
refused() {
    expected=$1 part=$2
    shift 2
    code=0
    "$@" >refused 2>&1 || code=$?
    cat refused
    same "the exit code of $*" "$expected" "$code"
    [ -z "$part" ] || grep -q "$part" refused || fail "the output of $* lacks '$part'"
}

# Waits for the command to succeed.
wait_for() {
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "this never succeeds: $*"
}

case $1 in
import)
    same "the machine" aarch64 "$(uname -m)"
    mkdir -p tree/bin tree/etc tree/proc tree/sys tree/dev tree/tmp
    cp /usr/bin/busybox tree/bin/
    for name in sh cat uname id; do ln -s busybox tree/bin/$name; done
    seq 30000 >tree/etc/numbers
    # This image has one object.
    mkdir -p data/etc
    cp tree/etc/numbers data/etc/
    quire import --form objects dir:data data
    object=$(find store/objects -type f)
    same "the object" "$(sha256sum <tree/etc/numbers)" "$(sha256sum <"$object")"
    # The kernel protects the object, also from root.
    if sh -c ": >>$object"; then fail "the object can be written"; fi
    lsattr "$object" | cut -d' ' -f1 | grep -q V || fail "the object has no fs-verity"
    echo "$object" >object
    quire import dir:tree tree
    quire images --json | grep -q '"tree:latest"' || fail "the image is not listed"
    quire verify data
    quire verify tree
    quire fsck
    ;;
verity)
    mkdir -p point
    quire mount --verity require data point
    cmp tree/etc/numbers point/etc/numbers
    grep " $PWD/point " /proc/self/mountinfo | tee mount | grep -q 'verity=require' || fail "$(cat mount)"
    quire umount point
    # Other bytes in the object's place are not read, and the same bytes without fs-verity neither.
    object=$(cat object)
    mv "$object" aside
    tr 1 2 <tree/etc/numbers >"$object"
    quire mount --verity require data point
    refused 1 'Input/output error' cat point/etc/numbers
    quire umount point
    refused 1 "$(basename "$object")" quire verify data
    rm "$object"
    cp tree/etc/numbers "$object"
    quire mount --verity require data point
    refused 1 'Input/output error' cat point/etc/numbers
    quire umount point
    rm "$object"
    mv aside "$object"
    quire mount --verity require data point
    cmp tree/etc/numbers point/etc/numbers
    quire umount point
    ;;
run)
    for runtime in crun runc; do
        run="quire run --rm --network none --runtime $runtime"
        same "the machine in $runtime" aarch64 "$($run tree uname -m)"
        same "the numbers in $runtime" "$(sha256sum <tree/etc/numbers)" "$($run tree cat /etc/numbers | sha256sum)"
        same "the user in $runtime" 5 "$($run -u 5:6 tree id -u)"
        refused 7 '' $run tree sh -c 'echo >/etc/new && exit 7'
        refused 127 none $run tree none
    done
    mkdir -p point
    quire mount tree point
    [ ! -e point/etc/new ] || fail "a container wrote into its image"
    quire umount point
    same "the containers that are left" '[]' "$(quire ps --all --json)"
    ;;
lazy)
    cat >registry.yml <<END
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $PWD/registry}}
http: {addr: "127.0.0.1:5000"}
END
    docker-registry serve registry.yml >registry.log 2>&1 &
    registry=$!
    wait_for sh -c 'busybox wget -q -O /dev/null http://127.0.0.1:5000/v2/'
    name=127.0.0.1:5000/team/app:1
    # Images from directories have no layers, which a registry needs.
    quire export tree tar:layer.tar
    quire import --form tar tar:layer.tar layered
    quire push layered $name
    quire pull --quiet --form tar --keep-layers $name
    quire index --no-start --push $name $name
    # Another store gets the image without its layer.
    quire() { command quire --store "$PWD/lazy" "$@"; }
    pulled=$(quire pull --json --lazy=require $name)
    echo "$pulled" | grep -q '"lazyDevices":1' || fail "no lazy device: $pulled"
    [ -d lazy/lazy ] || fail "the store has no lazy devices"
    if [ -d lazy/data ] && find lazy/data -type f | grep .; then fail "a layer was downloaded"; fi
    # Not the function, whose process would be a shell.
    command quire --store "$PWD/lazy" serve --lazy >serve.log 2>&1 &
    service=$!
    wait_for grep -q '^fills' serve.log
    mkdir -p point
    quire mount --lazy $name point
    cmp tree/etc/numbers point/etc/numbers
    cmp tree/bin/busybox point/bin/busybox
    quire umount point
    same "the numbers in a container" "$(sha256sum <tree/etc/numbers)" \
        "$(quire run --rm --lazy --network none $name cat /etc/numbers | sha256sum)"
    kill $service $registry
    wait $service || fail "the service ends with $?: $(cat serve.log)"
    ;;
*) fail "there is no step $1" ;;
esac
