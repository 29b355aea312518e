# Go's archive/tar, by crane: a tar is taken as it is, then all of it is written anew.
cd "$CONTENT"
tar -cf "$WORK/1" --format=pax --xattrs --xattrs-include='user.*' --xattrs-include='security.*' --numeric-owner .
tar -cf "$WORK/2" --format=gnu --numeric-owner usr/share/doc
"$CRANE" append -f "$WORK/1,$WORK/2" -t "$REGISTRY/go:parts"
"$CRANE" flatten -t "$REGISTRY/go:flat" "$REGISTRY/go:parts"
rm "$WORK/1" "$WORK/2"
skopeo copy --quiet --src-tls-verify=false "docker://$REGISTRY/go:flat" "dir:$OUT"
