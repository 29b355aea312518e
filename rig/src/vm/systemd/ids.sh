# A user without a range in the files gets ids from systemd for as long as a container runs.
session() { su --login you --shell=/bin/sh --command "set -eux; $1"; }
if grep you: /etc/subuid /etc/subgid; then exit 1; fi
mkdir -p /tmp/owned/bin /tmp/owned/etc /tmp/owned/own
cp /bin/busybox /tmp/owned/bin/
for it in sh id cat ls stat touch mkdir chown sleep; do ln -s busybox "/tmp/owned/bin/$it"; done
echo of five >/tmp/owned/own/file
chown 5:6 /tmp/owned/own /tmp/owned/own/file
chmod 700 /tmp/owned/own
printf 'root:x:0:0::/:/bin/sh\nfive:x:5:6::/own:/bin/sh\n' >/tmp/owned/etc/passwd
tar --create --file=/tmp/owned.tar --directory=/tmp/owned .
mkdir --mode=777 /tmp/shared
chown you:you /tmp/shared

# Without the service, there is only root, and it is said.
session '
    quire import --quiet tar:/tmp/owned.tar owned
    quire doctor | grep "this user has no range in /etc/subuid"
    quire run --rm --via tree owned stat -c %u /own/file >out 2>said
    test "$(cat out)" = 0
    grep "this user has no range in /etc/subuid" said
'
# The service is waited for: without KVM it takes long to load its program.
systemctl start systemd-nsresourced.socket systemd-nsresourced.service quire-mounts.socket
session '
    quire doctor | grep "with ids from systemd-nsresourced inside"
    run="quire run --rm --via"
    for way in tree service; do
        test "$($run $way owned stat -c %u:%g /own/file 2>&1)" = 5:6
        test "$($run $way --user five owned sh -c "id -u; cat /own/file; touch /own/new; stat -c %u /own/new" 2>&1)" = "5
of five
5"
        test "$($run $way owned sh -c "touch /x; chown 65536:65535 /x; stat -c %u:%g /x" 2>&1)" = 65536:65535
    done
    # Two at once have ids of their own, and others can get in.
    quire run --quiet --detach --name c --via tree owned sh -c "chown 7 /own/file; sleep 1000"
    quire run --detach --name d --via tree owned sleep 1000
    test "$(quire exec --user five c id -u)" = 5
    outside() { quire exec $1 cat /proc/self/uid_map | while read a b c; do test $a = 0 || echo $b; done; }
    test "$(outside c)" -gt 0
    test "$(outside d)" -gt 0
    test "$(outside c)" != "$(outside d)"
    # What was written keeps its owners.
    quire commit c committed
    quire stop --time 0 c d
    quire rm c d
    test "$($run tree committed stat -c %u /own/file)" = 7
    # Nothing stays with ids that somebody else gets the next time.
    $run tree --user five --volume /tmp/shared:/v owned touch /v/file 2>&1 | grep "touch: .*Operation not permitted"
    $run tree --volume /tmp/shared:/v owned sh -c "touch /v/of-root; chown 5 /v/of-root" 2>&1 |
        grep "chown: .*Operation not permitted"
    test "$(stat -c %U /tmp/shared/*)" = you
    mkdir layer
    $run tree --writable dir=layer owned sh -c "echo new >/own/new; stat -c %u /own/new" >out 2>said
    test "$(cat out)" = 0
    grep "neither for --writable dir" said
    $run tree --writable dir=layer owned cat /own/new
'
# One whose group has another number: the service does not register such a namespace, and groups stay as they are.
su --login other --shell=/bin/sh --command '
    set -eux
    quire import --quiet tar:/tmp/owned.tar owned
    quire run --rm --via tree --user five owned sh -c "id -u; id -g; cat /own/file" >out 2>said || { cat said; exit 1; }
    test "$(cat out)" = "5
6
of five"
    grep "cannot change their groups" said
'
# One whose number is among those of containers can write nothing that stays, if it asks for ids.
su --login high --shell=/bin/sh --command '
    set -eux
    quire import --quiet tar:/tmp/owned.tar owned
    quire run --rm --via tree owned stat -c %u /own/file >out 2>said || { cat said; exit 1; }
    test "$(cat out)" = 0
    grep "numbers from 524288" said
'
# Where there is no service, all is as before.
systemctl stop systemd-nsresourced.socket systemd-nsresourced.service
session 'test "$(quire run --quiet --rm --via tree owned stat -c %u /own/file)" = 0'
