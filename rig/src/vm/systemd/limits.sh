# A user in a login session, whose own cgroup belongs to root: limits hold, and later commands of other sessions get there.
session() { su --login me --shell=/bin/sh --command "set -eux; $1"; }
session '
    grep -q session- /proc/self/cgroup
    quire doctor | grep "limits of containers work by the user.s systemd"
    run="quire run --rm --runtime crun --via tree"
    test "$($run --memory 64m --pids-limit 40 a sh -c "cd /sys/fs/cgroup; cat memory.max pids.max" 2>&1)" = "67108864
40"
    test "$($run --cpus 0.5 a cat /sys/fs/cgroup/cpu.max 2>&1)" = "50000 100000"
    # Without limits no scope is asked for.
    test "$($run a sh -c "ls /sys/fs/cgroup; id -u" 2>&1)" = 0
    # A scope that was delegated is used as it is.
    systemd-run --user --scope --quiet --unit=own -p Delegate=yes sh -eux -c "
        test \"\$($run --memory 32m a cat /sys/fs/cgroup/memory.max)\" = 33554432
        grep own.scope/quire /proc/self/cgroup"
    # One that was not is systemd'"'"'s: nothing moves in there, and another one is asked for.
    systemd-run --user --scope --quiet --unit=other sh -eux -c "
        test \"\$($run --memory 32m a cat /sys/fs/cgroup/memory.max)\" = 33554432
        grep other.scope$ /proc/self/cgroup"
    # What goes on may be ended with the login.
    quire run --quiet --detach --name c --memory 64m a sleep 1000
    quire run --detach --name d --memory 64m a sleep 1000 2>&1 | grep "loginctl enable-linger"
    quire rm --force d
'
loginctl enable-linger me
session '
    systemctl --user list-units --no-legend "quire-*.scope" | grep running
    test "$(quire exec c cat /proc/self/cgroup)" = 0::/
    test "$(quire exec c cat /sys/fs/cgroup/memory.max)" = 67108864
'
# With it, the container is there when its user has long been gone.
sleep 15
session '
    test "$(quire exec c cat /sys/fs/cgroup/memory.max)" = 67108864
    quire run --detach --name d --memory 64m a sleep 1000 2>&1 | { ! grep linger; }
    quire stop --time 0 c d
    quire rm c d
    # Nothing is left of the containers.
    for i in $(seq 100); do
        test -n "$(systemctl --user list-units --all --no-legend "quire-*.scope")" || break
        sleep 0.1
    done
    test -z "$(systemctl --user list-units --all --no-legend "quire-*.scope")"
'
loginctl disable-linger me
