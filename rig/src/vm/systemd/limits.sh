# A user in a login session, whose own cgroup belongs to root: limits hold, and later commands of other sessions get there.
session() { su --login me --shell=/bin/sh --command "set -eux; $1"; }
session '
    grep -q session- /proc/self/cgroup
    quire doctor | grep "limits of containers work by the user.s systemd"
    run="quire run --rm --runtime crun --via tree"
    test "$($run --memory 64m --pids-limit 40 a sh -c "cd /sys/fs/cgroup; cat memory.max pids.max" 2>&1)" = "67108864
40"
    test "$($run --cpus 0.5 a cat /sys/fs/cgroup/cpu.max 2>&1)" = "50000 100000"
    # Without limits nobody is asked.
    test "$($run a sh -c "ls /sys/fs/cgroup; id -u" 2>&1)" = 0
    # A scope that somebody else has asked for is used as it is.
    test "$(systemd-run --user --scope --quiet -p Delegate=yes $run --memory 32m a cat /sys/fs/cgroup/memory.max)" = 33554432
    quire run --quiet --detach --name c --memory 64m a sleep 1000
'
session '
    systemctl --user list-units --no-legend "quire-*.scope" | grep running
    test "$(quire exec c cat /proc/self/cgroup)" = 0::/
    test "$(quire exec c cat /sys/fs/cgroup/memory.max)" = 67108864
    quire stop --time 0 c
    quire rm c
    # Nothing is left of the containers.
    for i in $(seq 100); do
        test -n "$(systemctl --user list-units --all --no-legend "quire-*.scope")" || break
        sleep 0.1
    done
    systemctl --user list-units --all --no-legend "quire-*.scope" | { ! grep .; }
'
