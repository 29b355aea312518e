# Makes /srv: jobs, what they work on, and what they must answer. Every job works below /srv/out, but dpkg.
mkdir -p /srv/jobs /srv/expect /srv/debs
gcc -O2 -o /srv/stress /srv/stress.c

# A real project and real packages.
sed 's/^deb /deb-src /' /etc/apt/sources.list > /etc/apt/sources.list.d/sources.list
apt-get -q -o Acquire::Check-Valid-Until=false update
(cd /srv && apt-get -q source --download-only lua5.4 && tar xf lua5.4_*.orig.tar.gz && rm lua5.4_* && mv lua-5.4* lua)
(cd /srv/debs && apt-get -q download git libc6-dev make gcc)
rm -rf /etc/apt/sources.list.d/sources.list /var/lib/apt/lists/*

# A repository that is the same each time.
export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'
git init -q -b main /srv/repository
cd /srv/repository
git config user.name bench
git config user.email bench@example.org
for commit in 1 2 3 4 5; do
    for folder in $(seq 60); do
        mkdir -p "source/$folder"
        for file in $(seq 50); do
            seq "$((folder * file))" "$commit" "$((folder * file + commit * 900))" > "source/$folder/$file.txt"
        done
    done
    cp -r /srv/lua/src "lua-$commit"
    git add .
    git commit -q -m "$commit"
done
git gc -q
git rev-parse HEAD > /srv/expect/head
rm -r source lua-?
cd /

cat > /srv/jobs/stress-nolinks <<'JOB'
cd /srv/out && /srv/stress 1680153482 20 500 20 nolinks
JOB
cat > /srv/jobs/stress <<'JOB'
cd /srv/out && /srv/stress 1680153482 20 500 20
JOB
cat > /srv/jobs/compile <<'JOB'
cp -r /srv/lua /srv/out/lua && cd /srv/out/lua
make -s -j2 linux MYCFLAGS=-O0 > /srv/out/log 2>&1
sha256sum src/lua src/liblua.a
ls src/*.o | wc -l
JOB
cat > /srv/jobs/clone <<'JOB'
git clone -q --no-local /srv/repository /srv/out/clone
cd /srv/out/clone
git rev-parse HEAD
git status --porcelain
find . -path ./.git -prune -o -type f -print | wc -l
JOB
cat > /srv/jobs/dpkg <<'JOB'
touch /srv/out/before
dpkg --unpack /srv/debs/*.deb > /srv/out/log 2>&1
find /usr /etc -xdev -type f -cnewer /srv/out/before ! -path '*.cache' | LC_ALL=C sort | sha256sum
find /usr -xdev -name '*.dpkg-*' | wc -l
JOB
cat > /srv/jobs/transactions <<'JOB'
cd /srv/out
{
    echo 'create table t (number integer, text text);'
    seq -f "insert into t values (%g, 'some text of a row');" 5000
} | sqlite3 data
sqlite3 data 'pragma integrity_check; select count(*), sum(number) from t;'
JOB
cat > /srv/jobs/files <<'JOB'
cd /srv/out
for folder in $(seq 200); do mkdir $folder; done
seq 100000 | awk '{ file = ($1 % 200 + 1) "/" $1; print $1, "a line of a changed file" > file; close(file) }'
find . -type f | wc -l
JOB
# What a job prints is compared with what it printed when this was made.
cat > /srv/run <<'JOB'
set -eu
mkdir -p /srv/out
sh -eu "/srv/jobs/$1" > /srv/answer
cmp /srv/answer "/srv/expect/$1"
JOB
mkdir /srv/out
for job in stress stress-nolinks compile clone dpkg transactions files; do
    sh -eu "/srv/jobs/$job" > "/srv/expect/$job"
    rm -rf /srv/out/* /srv/out/.??*
done
rmdir /srv/out
