# The mount service starts when a user asks, and lends images, also those of its own home.
session() { su --login me --shell=/bin/sh --command "set -eux; $1"; }
if systemctl is-active quire-mounts.service; then exit 1; fi
session '
    test "$(quire run --rm --via service a sh -c "cat /etc/hello; id -u")" = "hello
0"
    quire run --rm --via service a cat /etc/large | cmp - /tmp/tree/etc/large
'
systemctl is-active quire-mounts.service
# With the rights that the unit leaves it, it knows who asks: root, and users outside namespaces.
quire doctor | grep "run works by the mount service"
session 'quire doctor | grep "run works by the mount service"'
HOME=$(eval echo ~me) setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=+wake_alarm \
    --ambient-caps=+wake_alarm quire doctor | grep "run works by the mount service"
# One that goes on has its root when the service is gone, and the next one starts it again.
session 'quire run --quiet --detach --name c --via service a sleep 1000'
systemctl stop quire-mounts.service
session '
    quire exec c cat /etc/large | cmp - /tmp/tree/etc/large
    quire run --rm --via service a cat /etc/hello
    quire rm --force c
'
# Root's image by mount(8), from fstab.
mkdir /srv/a
echo 'a /srv/a quire nofail 0 0' >>/etc/fstab
systemctl daemon-reload
systemctl start srv-a.mount
cmp /srv/a/etc/large /tmp/tree/etc/large
systemctl stop srv-a.mount
if grep /srv/a /proc/mounts; then exit 1; fi
