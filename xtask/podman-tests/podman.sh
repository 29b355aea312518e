#!/bin/bash
# $PODMAN of podman's system tests: calls $QUIRE, and translates only commands of setup and teardown, and questions about
# the host. A command under test reaches Quire as it is. The variables of the environment are those of
# xtask/src/podman_tests.rs.

# The tests' registry runs from a separate store, which these options name in podman.
while [ $# -gt 0 ]; do
    case $1 in
        --root) export QUIRE_STORE=$REGISTRY_STORE; shift 2 ;;
        --runroot | --tmpdir | --storage-driver) shift 2 ;;
        *) break ;;
    esac
done

# Prints the short id of the tests' image if the command removes an image by such an id.
test_image_id() {
    [ "${words[0]}" = rmi ] && "$QUIRE" images --format '{{.ID}}' "$TEST_IMAGE" 2> /dev/null
}

words=("$@")
case "$*" in
    # Questions of helpers.bash, which decide what tests run
    "info --format {{.Store.GraphDriverName}}") echo overlay; exit ;;
    "info --format {{.Host.NetworkBackend}}") echo netavark; exit ;;

    # Setup and teardown of helpers.bash, which fetches the tests' image if a test removed it, and removes an image
    # that a test made by its name and by its id, which may be that of the tests' image
    "image exists $TEST_IMAGE") "$QUIRE" image exists "$TEST_IMAGE" || exec "$QUIRE" load -q -i "$TEST_IMAGE_FILE"; exit ;;
    "rmi --force $(test_image_id)") exit ;;
    "pod rm -t 0 --all --force --ignore") exit ;;
    "pod ls --format"*) exit ;;
    "ps --all --external --format"*) exit ;;
    "network prune --force") "$QUIRE" network prune --force > /dev/null 2>&1; exit ;;
    "volume rm -t 0 -a -f") exec "$QUIRE" volume rm -a -f ;;
    "rmi -a -f") exit ;;
esac
exec "$QUIRE" "$@"
