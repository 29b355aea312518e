#!/bin/sh
# The first program of a guest's real root: runs what the plan says, tells the results on the second serial port, and ends
# the machine. A line of a program's output begins with a bar, so that none can be taken for one of ours.
# The last folder is for a root that is no disk of ours. With an argument, systemd is the first program and has mounted all.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/vm HOME=/root LC_ALL=C.UTF-8
. /vm/environment
report=${report:-/dev/ttyS1}
stty -F $report raw -echo
if [ $# = 0 ]; then
    mount -t tmpfs tmpfs /run
    mkdir -p /dev/pts /dev/shm /sys/fs/cgroup
    mount -t devpts devpts /dev/pts
    mount -t tmpfs tmpfs /dev/shm
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mount -t securityfs securityfs /sys/kernel/security
    ln -sf /proc/self/fd /dev/fd
    mount -o remount,rw /
    ip link set lo up
    hostname quire-vm
fi
echo "BOOTED $(uname -r) $(cut -d' ' -f1 /proc/uptime)" >$report
while read -r name seconds command; do
    echo "BEGIN $name" >$report
    {
        # A session of its own, so that it cannot get at the console.
        timeout -k 10 "$seconds" setsid -w sh -c "cd /vm && $command" </dev/null 2>&1
        echo $? >/run/code
    } | sed -u 's/^/|/' >$report
    echo >$report
    echo "END $name $(cat /run/code) $(cut -d' ' -f1 /proc/uptime)" >$report
done </vm/plan
echo "DONE" >$report
sync
# Not before the port has sent everything.
stty -F $report 115200
busybox poweroff -f
