"""In the guest: starts the servers of two images, each in a separate container, puts load on both, and prints what they take.

Arguments: the load, how to mount, whether to share, the store or folder, and the two images. A container is an overlay
with its changes on tmpfs, a network, processes and a separate memory cgroup. Prints one line: RESULT, then bytes of both
cgroups: pages of files (without tmpfs and shared memory), memory of processes, and all that the kernel charges.
"""
import os
import shutil
import subprocess
import sys
import time

import pagecache

CGROUPS = "/sys/fs/cgroup"
# Changes of containers, also what `prepare` made.
STATE = "/run/state"

AS = "setpriv --reuid {0} --regid {0} --clear-groups env HOME=/tmp "
POSTGRES = AS.format("postgres") + "/usr/lib/postgresql/15/bin/"


def nginx_of_files(sendfile):
    """nginx that serves the image's own libraries and documents, all of which the load reads once."""
    config = f"events {{}} http {{ access_log off; sendfile {sendfile}; server {{ listen 80; root /usr; }} }}"
    return {
        "server": f"echo '{config}' > /tmp/nginx.conf; exec nginx -c /tmp/nginx.conf -g 'daemon off;'",
        "port": 80,
        "files": "usr",
    }


# By load: what is done once, the server, its port, and what it has to do: inside of the container, by a program of the
# guest's, or by sending the files below a folder. `program` is a program of the guest's that loads an image's files and
# then writes READY.
SERVERS = {
    "nginx": {
        "server": "exec nginx -g 'daemon off;'",
        "port": 80,
        "outside": ["/vm/wrk", "-t1", "-c8", "-d4s", "http://127.0.0.1:80/"],
    },
    "nginx-sendfile": nginx_of_files("on"),
    "nginx-read": nginx_of_files("off"),
    "tensorflow": {"program": ["python3", "/mnt/tensorload.py"]},
    "redis": {
        "server": "cd /tmp; exec redis-server --save '' --port 6379",
        "port": 6379,
        "inside": "redis-benchmark -q -n 300 -c 10 -r 300",
    },
    "postgresql": {
        "prepare": f"""
            mkdir -p /var/lib/postgresql/data && chown postgres:postgres /var/lib/postgresql/data
            {POSTGRES}initdb --no-sync -A trust -D /var/lib/postgresql/data
            {POSTGRES}pg_ctl -w -D /var/lib/postgresql/data -o '-k /tmp -c listen_addresses=127.0.0.1' start
            {POSTGRES}pgbench -h 127.0.0.1 -i -s 1 postgres
            {POSTGRES}pg_ctl -w -m fast -D /var/lib/postgresql/data stop""",
        "server": f"exec {POSTGRES}postgres -k /tmp -c listen_addresses=127.0.0.1 -D /var/lib/postgresql/data",
        "port": 5432,
        "inside": f"{POSTGRES}pgbench -h 127.0.0.1 -n -c 4 -T 5 postgres",
    },
    "tomcat": {
        "server": """
            export CATALINA_HOME=/usr/share/tomcat10 CATALINA_BASE=/var/lib/tomcat10 CATALINA_TMPDIR=/tmp JAVA_OPTS=-Xmx128m
            exec setpriv --reuid tomcat --regid tomcat --clear-groups sh $CATALINA_HOME/bin/catalina.sh run""",
        "port": 8080,
        "outside": ["/vm/wrk", "-t1", "-c4", "-d5s", "http://127.0.0.1:8080/"],
    },
    "mariadb": {
        "prepare": """
            mariadb-install-db --force --user=mysql --datadir=/var/lib/mysql --auth-root-authentication-method=normal --skip-test-db""",
        "server": """
            exec mariadbd --user=mysql --datadir=/var/lib/mysql --bind-address=127.0.0.1 --socket=/tmp/mysql.sock""",
        "port": 3306,
        "inside": """
            mariadb-slap --host=127.0.0.1 --user=root --auto-generate-sql --concurrency=4 --number-of-queries=400""",
    },
}
# What the guest may take to start a server or for its load, in seconds.
LIMIT = 300


class Container:
    """One of two, over an image that is mounted."""

    def __init__(self, number):
        self.cgroup = f"{CGROUPS}/container-{number}"
        self.root = f"/run/root-{number}"
        for folder in [self.cgroup, self.root, f"{STATE}/upper-{number}", f"{STATE}/work-{number}"]:
            os.makedirs(folder, exist_ok=True)
        options = f"lowerdir={pagecache.POINTS[number]},upperdir={STATE}/upper-{number},workdir={STATE}/work-{number}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", self.root], check=True)
        # An unpacked wheel has none of them.
        for name in ["/proc", "/dev", "/tmp"]:
            os.makedirs(self.root + name, exist_ok=True)
        for name in ["/proc", "/dev"]:
            subprocess.run(["mount", "--bind", name, self.root + name], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", self.root + "/tmp"], check=True)
        self.server = None

    def enter(self):
        with open(f"{self.cgroup}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def start_program(self, command):
        """Starts a program of the guest's with the container's root as its last argument."""
        self.server = subprocess.Popen(
            [*command, self.root], preexec_fn=self.enter, stdout=subprocess.PIPE, text=True
        )

    def wait_for_program(self):
        line = self.server.stdout.readline()
        if line != "READY\n":
            sys.exit(f"the program says {line!r}")

    def start(self, script):
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "chroot", self.root]
        command += ["sh", "-c", "ip link set lo up 2>/dev/null; " + script]
        self.server = subprocess.Popen(
            command, preexec_fn=self.enter, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        # Minimal systems have no ip(8).
        while os.readlink(f"/proc/{self.server.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        subprocess.run([*self.network(), "ip", "link", "set", "lo", "up"], check=True)

    def network(self):
        return ["nsenter", f"--net=/proc/{self.server.pid}/ns/net"]

    def wait(self, port):
        """Until it answers."""
        end = time.monotonic() + LIMIT
        probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        while True:
            ran = subprocess.run([*self.network(), "python3", "-c", probe], capture_output=True)
            if ran.returncode == 0:
                return
            if self.server.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server does not answer: {self.server.poll()}")
            time.sleep(0.2)

    def inside(self, script, network=()):
        subprocess.run(
            [*network, "chroot", self.root, "sh", "-ec", script],
            check=True, preexec_fn=self.enter, timeout=LIMIT, stdout=sys.stderr,
        )

    def load(self, server):
        if "inside" in server:
            self.inside(server["inside"], self.network())
        elif "files" in server:
            command = [*self.network(), "python3", "/mnt/pageget.py", os.path.join(self.root, server["files"])]
            subprocess.run(command, check=True, timeout=LIMIT * 3, stdout=sys.stderr)
        else:
            ran = subprocess.run(
                [*self.network(), *server["outside"]],
                check=True, timeout=LIMIT, text=True, capture_output=True,
            )
            print(ran.stdout, file=sys.stderr)
            if "Requests/sec" not in ran.stdout or "Non-2xx" in ran.stdout:
                sys.exit("the server did not serve")

    def charged(self):
        with open(f"{self.cgroup}/memory.stat") as file:
            stat = {name: int(value) for name, value in (line.split() for line in file)}
        with open(f"{self.cgroup}/memory.current") as file:
            return stat["file"] - stat["shmem"], stat["anon"], int(file.read())

    def end(self):
        with open(f"{self.cgroup}/cgroup.kill", "w") as file:
            file.write("1")
        if self.server:
            self.server.wait()
        while open(f"{self.cgroup}/cgroup.procs").read():
            time.sleep(0.05)
        subprocess.run(["umount", "--recursive", self.root], check=True)
        os.rmdir(self.cgroup)


def main():
    name, how, share, place, *images = sys.argv[1:]
    server = SERVERS[name]
    with open(f"{CGROUPS}/cgroup.subtree_control", "w") as file:
        file.write("+memory")
    prepared = os.path.join(STATE, "prepared-" + name)
    if not os.path.exists(prepared):
        shutil.rmtree(STATE, ignore_errors=True)
    # As EROFS reads from files: what is read ahead of mapped programs counts, too.
    if os.path.exists("/sys/class/block/vdb"):
        with open("/sys/class/block/vdb/queue/read_ahead_kb", "w") as file:
            file.write("128")
    pagecache.mount(how, share, place, images)
    containers = []
    try:
        if not os.path.exists(prepared):
            for number in [0, 1] if "prepare" in server else []:
                container = Container(number)
                containers.append(container)
                container.start("exec sleep infinity")
                container.inside("set -x\n" + server["prepare"], container.network())
                containers.pop().end()
            open(prepared, "w").close()
        pagecache.drop()
        pagecache.drop()
        for number in [0, 1]:
            containers.append(Container(number))
        for container in containers:
            if "program" in server:
                container.start_program(server["program"])
                container.wait_for_program()
            else:
                container.start(server["server"])
                container.wait(server["port"])
        for container in containers:
            if "program" not in server:
                container.load(server)
        # Counts of cgroups come together every two seconds.
        time.sleep(3)
        print("\nRESULT", *(sum(both) for both in zip(*(it.charged() for it in containers))))
        for container in containers:
            if container.server.poll() is not None:
                sys.exit("a server ended before its time")
    finally:
        for container in containers:
            container.end()
        pagecache.unmount()


if __name__ == "__main__":
    main()
