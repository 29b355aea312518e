# systemd's own tools list images, and mount them.
trap 'journalctl --no-pager --no-hostname --unit="quire-storage@*" | tail -20' EXIT
storagectl --no-pager providers | grep quire
storagectl --no-pager --no-legend volumes 'a:*' | grep quire
mount -t storage quire:a /mnt
cmp /mnt/etc/large /tmp/tree/etc/large
if touch /mnt/new; then exit 1; fi
umount /mnt
# What was lent to nobody goes by itself, and with it the last process.
for i in $(seq 900); do
    test -n "$(systemctl list-units --all --no-legend 'quire-storage@*.service')" || break
    sleep 0.1
done
test -z "$(systemctl list-units --all --no-legend 'quire-storage@*.service')"
if grep -E 'erofs|quire' /proc/mounts; then exit 1; fi
