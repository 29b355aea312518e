# umoci's Go writer: a base of everything, then a repack that deletes, adds and changes.
cd "$WORK"
umoci init --layout layout
umoci new --image layout:1
umoci unpack --image layout:1 bundle
cp -a "$CONTENT/." bundle/rootfs
umoci repack --image layout:1 bundle
rm -r bundle/rootfs/usr/share/doc/bash bundle/rootfs/etc/issue
mkdir bundle/rootfs/etc/issue && echo new > bundle/rootfs/etc/issue/net
chmod 700 bundle/rootfs/srv
umoci repack --image layout:1 bundle
umoci config --image layout:1 --config.cmd /bin/true
skopeo copy --quiet oci:layout:1 "dir:$OUT"
