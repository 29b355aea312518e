# GNU tar with PAX records for times, xattrs, ACLs and sparse files, one block to a record; nothing compresses it.
cd "$CONTENT"
tar -cf "$WORK/1.tar" --format=pax --blocking-factor=1 --xattrs --xattrs-include='*' --acls --sparse \
    --sparse-version=1.0 --numeric-owner --sort=name .
# Padded as no tar pads: to a length that is no multiple of 512.
head -c 12345 /dev/zero >> "$WORK/1.tar"
tar -cf "$WORK/2.tar" --format=pax --sparse --hole-detection=raw --sparse-version=0.1 \
    --pax-option=globexthdr.name=global,comment=odd srv
tar -cf "$WORK/3.tar" --format=pax --sparse --sparse-version=0.0 --blocking-factor=7 srv
