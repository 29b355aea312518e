# git archive: a global PAX header with the commit, modes that git knows, names as they are.
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_DATE="2026-01-01T00:00:00Z" GIT_COMMITTER_DATE="2026-01-01T00:00:00Z"
cd "$WORK"
git init -q repository
cp -a "$CONTENT/etc" "$CONTENT/usr/share/doc" "$CONTENT/usr/share/zoneinfo" repository
cp -a "$CONTENT/srv/odd/deep" repository
git -C repository add -A
git -C repository -c user.name=name -c user.email=name@example.org commit -q -m content
git -C repository archive --format=tar --prefix=opt/source/ -o "$WORK/1.tar" HEAD
git -C repository archive --format=tar.gz -o "$WORK/2.tar.gz" HEAD deep
gzip -dc 2.tar.gz > 2.tar
rm -r repository
