#!/bin/busybox sh
# The first program of a guest: loads modules and goes on in the real root.
PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
while read -r file module; do
    insmod "/modules/$file" || echo "quire-vm: cannot load $module"
done </modules/order
if ! sh -e /mount-root; then
    echo "quire-vm: cannot mount the root"
    poweroff -f
fi
mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
exec switch_root /root /vm/init
