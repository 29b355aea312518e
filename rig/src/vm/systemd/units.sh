# The units are enabled as their documentation says, and an image is there, for root and for a user.
systemctl enable --now quire-mounts.socket quire-storage.socket
systemctl enable --now quire-lazy.service quire-snapshotter.service
systemctl is-active quire-mounts.socket quire-storage.socket quire-lazy.service quire-snapshotter.service
mkdir -p /tmp/tree/bin /tmp/tree/etc /tmp/tree/tmp
cp /usr/bin/busybox /tmp/tree/bin/
for name in sh cat id ls sleep; do ln -s busybox /tmp/tree/bin/$name; done
echo hello >/tmp/tree/etc/hello
# A file that is too large to be in the image itself.
head -c 300000 /dev/urandom >/tmp/tree/etc/large
tar --create --file=/tmp/tree.tar --directory=/tmp/tree .
quire import --quiet tar:/tmp/tree.tar a
su --login me --command 'quire import --quiet tar:/tmp/tree.tar a'
