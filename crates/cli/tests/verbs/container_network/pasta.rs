//! `--network pasta` and `--publish`. The tests need root, to make a network namespace that represents the host's
//! network.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kernel::mount::Propagation;
use kernel::process::Namespace;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::json;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{in_own_mounts, place, runtimes, wait_for};
use crate::{Place, Ran, add_programs, program};

/// Address of the network's only card, and another address of the host. Source: RFC 5737.
const CARD: &str = "192.0.2.1";
const ROUTER: &str = "192.0.2.254";
const ELSEWHERE: &str = "198.51.100.9";

/// A server that handles connections or packets one at a time, and a client. Both are in Perl, which a Debian base
/// image contains.
const SERVE: &str = r#"
    use IO::Socket::INET;
    my ($kind, $port) = @ARGV;
    my @how = (LocalAddr => "0.0.0.0", LocalPort => $port, Proto => $kind);
    my $socket = IO::Socket::INET->new(@how, $kind eq "tcp" ? (Listen => 5) : ()) or die "$!\n";
    while (1) {
        if ($kind eq "tcp") {
            my $peer = $socket->accept or next;
            print $peer "hello from $port\n";
            close $peer;
        } else {
            my $sender = $socket->recv(my $said, 100);
            $socket->send("heard $said", 0, $sender);
        }
    }
"#;
const ASK: &str = r#"
    use IO::Socket::INET;
    my ($address, $said) = @ARGV;
    my $kind = defined $said ? "udp" : "tcp";
    my $socket = IO::Socket::INET->new(PeerAddr => $address, Proto => $kind, Timeout => 5)
        or die "not reached: $!\n";
    $SIG{ALRM} = sub { die "no answer\n" };
    alarm 5;
    # Pasta of Debian 12 passes nothing of a server on that speaks first.
    $socket->send($said // "me");
    $socket->recv(my $heard, 100);
    print $heard;
"#;

/// Moves this test's thread, and all programs that it starts, into a network namespace that represents the host's. Its
/// interface is not connected to another network.
pub(crate) fn own_network() -> bool {
    for name in ["ip", "pasta"] {
        if program(name).is_none() {
            assert!(std::env::var_os("CI").is_none(), "CI has no {name}: packages iproute2, passt");
            testing::skipped(&format!("{name} is not installed"));
            return false;
        }
    }
    kernel::process::unshare(&[Namespace::Network]).unwrap();
    kernel::process::own_mounts(Propagation::Private).unwrap();
    let ip = |line: &str| {
        Command::new(program("ip").unwrap()).args(line.split(' ')).status().unwrap().success()
    };
    if !ip("link add card0 type veth peer name card1") {
        testing::skipped("this kernel makes no cards of the kind veth");
        return false;
    }
    for line in [
        "link set lo up",
        &format!("address add {CARD}/24 dev card0"),
        "link set card0 up",
        &format!("route add default via {ROUTER}"),
        &format!("address add {ELSEWHERE}/32 dev lo"),
    ] {
        assert!(ip(line), "ip {line}");
    }
    true
}

/// Another machine in the same network, which is removed on drop.
struct Neighbour(std::process::Child);

impl Neighbour {
    fn new() -> Self {
        let mut sleep = Command::new("unshare");
        let neighbour = Self(sleep.args(["--net", "sleep", "1000"]).spawn().unwrap());
        let id = neighbour.0.id().to_string();
        let mut own = Command::new(program("ip").unwrap());
        own.args(["link", "set", "card1", "netns", &id]);
        // The process may not be in its own network namespace yet, and then the interface would not be moved.
        wait_for("a neighbour", || {
            let network = |id: &str| fs::read_link(format!("/proc/{id}/ns/net")).unwrap();
            network(&id) != network("thread-self")
        });
        assert!(own.status().unwrap().success());
        for line in ["address add 192.0.2.9/24 dev card1", "link set card1 up"] {
            let words = [&["ip"], &line.split(' ').collect::<Vec<_>>()[..]].concat();
            assert!(neighbour.command(&words).status().unwrap().success(), "{line}");
        }
        neighbour
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.0.id().to_string(), "--net", "--"]).args(words);
        command
    }

    /// Asks a server of the host until it replies.
    fn answer(&self, place: &Place, words: &[&str]) -> String {
        let script = place.path("tree/ask").display().to_string();
        let mut heard = String::new();
        wait_for("an answer to a neighbour", || {
            let mut ask = self.command(&[&["perl", &*script], words].concat());
            heard = Ran::from_output(&ask.output().unwrap()).out;
            !heard.is_empty()
        });
        heard
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Lets all users make interfaces, like udev, for this test's thread and all programs that it starts.
pub(crate) fn open_tun(place: &Place) {
    let node = place.path("tun");
    let mode = Mode::from_raw_mode(0o666);
    mknodat(CWD, &node, FileType::CharacterDevice, mode, makedev(10, 200)).unwrap();
    fs::set_permissions(&node, fs::Permissions::from_mode(0o666)).unwrap();
    let bound = Command::new("mount").arg("--bind").arg(&node).arg("/dev/net/tun").status();
    assert!(bound.unwrap().success());
}

/// A place with an image `a` that has Perl and the two programs.
fn with_network() -> Option<Place> {
    let place = place()?;
    add_network(&place.path("tree"))?;
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    own_network().then_some(place)
}

/// Adds Perl and the two programs to a tree.
pub(crate) fn add_network(tree: &Path) -> Option<()> {
    if program("perl").is_none() {
        testing::skipped("perl is not installed");
        return None;
    }
    add_programs(tree, &["/usr/bin/perl"]);
    let paths = Command::new(program("perl").unwrap())
        .args(["-e", "print join qq(\\n), @INC"])
        .output()
        .ok()?;
    let paths = String::from_utf8(paths.stdout).unwrap();
    let Some(library) = paths.lines().find(|it| it.ends_with("/perl-base")) else {
        testing::skipped("no perl of Debian's package perl-base");
        return None;
    };
    let target = tree.join(library.trim_start_matches('/'));
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    let copied =
        Command::new(program("cp").unwrap()).arg("-aT").arg(library).arg(&target).status().unwrap();
    assert!(copied.success());
    for (name, text) in [("serve", SERVE), ("ask", ASK)] {
        fs::write(tree.join(name), text).unwrap();
    }
    Some(())
}

/// Asks a TCP server of the host until it replies.
pub(crate) fn answer(address: &str) -> String {
    let address: SocketAddr = address.parse().unwrap();
    let mut heard = String::new();
    wait_for("an answer", || {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) else {
            return false;
        };
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        heard.clear();
        // Pasta may listen before the container does.
        stream.read_to_string(&mut heard).is_ok() && !heard.is_empty()
    });
    heard
}

/// Starts a server of the host that sends this text to each client.
fn says(address: &str, text: &'static str) -> SocketAddr {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // If the connection is closed with unread data, the written data is lost.
            let _said = stream.read(&mut [0; 100]);
            let _left = stream.write_all(text.as_bytes());
        }
    });
    address
}

/// Returns the pasta process of a container in the background, which is a child of its monitor.
fn pasta(place: &Place, name: &str) -> Option<PathBuf> {
    let state = fs::read_to_string(place.path(&format!("store/containers/{name}/state.json")));
    let state: serde_json::Value = serde_json::from_str(&state.ok()?).ok()?;
    let monitor = &state["monitor"];
    let children = format!("/proc/{monitor}/task/{monitor}/children");
    let children = fs::read_to_string(children).ok()?;
    let is_pasta =
        |it: &PathBuf| fs::read_to_string(it.join("comm")).is_ok_and(|it| it.starts_with("pas"));
    children.split_whitespace().map(|it| Path::new("/proc").join(it)).find(is_pasta)
}

fn status(process: &Path, field: &str) -> Vec<String> {
    let text = fs::read_to_string(process.join("status")).unwrap();
    let line = text.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_container_and_others_reach_each_other() {
    let Some(place) = with_network() else { return };
    let neighbour = Neighbour::new();
    let outside = says(&format!("{ELSEWHERE}:0"), "from outside\n").to_string();
    for runtime in runtimes() {
        for more in [&[][..], &["--userns", "auto"], &["--user", "33:33"]] {
            let _guard = Rm(&place, "web");
            let ports = ["-p", "127.0.0.1:8080:80", "-p", "5300-5301:53-54/udp", "-p", "81"];
            let options = ["--name", "web", "--runtime", runtime];
            // All users may listen at low ports in the container.
            let user = if more.is_empty() { &["-u", "0"][..] } else { &[] };
            let before = [&["run", "--quiet", "--detach"], user, &options, &ports, more].concat();
            let script = "perl /serve tcp 80 & perl /serve tcp 81 & perl /serve udp 53 & exec perl /serve udp 54";
            let more_words = ["a", "--", "sh", "-c", script];
            let ran = place.run_each(&[&before[..], &more_words].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {more:?}: {}", ran.err);
            assert_eq!(answer("127.0.0.1:8080"), "hello from 80\n", "{runtime} {more:?}");

            let listed = ps(&place, "web").unwrap()["ports"].clone();
            let any = listed[2]["host"].as_u64().unwrap();
            let port = |host: u64, container: u64, count: u64, protocol: &str| {
                json!({"address": null, "host": host, "container": container, "count": count,
                       "protocol": protocol})
            };
            let mut first = port(8080, 80, 1, "tcp");
            first["address"] = json!("127.0.0.1");
            assert_eq!(listed, json!([first, port(5300, 53, 2, "udp"), port(any, 81, 1, "tcp")]));
            let table = place.out("ps");
            let expect = format!(
                "127.0.0.1:8080->80/tcp, 0.0.0.0:5300-5301->53-54/udp, 0.0.0.0:{any}->81/tcp"
            );
            assert!(table.contains(&expect), "{table}");
            let asked = neighbour.answer(&place, &[&format!("{CARD}:{any}")]);
            assert_eq!(asked, "hello from 81\n", "{runtime} {more:?}");
            let asked = neighbour.answer(&place, &[&format!("{CARD}:5301"), "me"]);
            assert_eq!(asked, "heard me", "{runtime} {more:?}");
            if runtime == "runc" && more.contains(&"--userns") {
                // runc up to 1.1 opens the network namespace from inside the user namespace, which has no rights over
                // it.
                continue;
            }
            let exec = ["exec", "web", "perl", "/ask", &outside];
            let ran = place.run_each(&exec);
            assert_eq!(ran.out, "from outside\n", "{runtime} {more:?}: {}", ran.err);
        }
        let foreground = ["run", "--quiet", "--runtime", runtime, "--network", "pasta", "a", "--"];
        let ran = place.run_each(&[&foreground[..], &["perl", "/ask", &outside]].concat());
        assert_eq!(ran.out, "from outside\n", "{runtime}: {}", ran.err);
    }
}

#[test]
fn the_loopback_of_the_host_is_out_of_reach() {
    let Some(place) = with_network() else { return };
    let port = says("127.0.0.1:0", "secret\n").port();
    let ask = |address: &str| {
        let words = ["run", "--quiet", "--network", "pasta", "a", "--", "perl", "/ask"];
        place.run_each(&[&words[..], &[&format!("{address}:{port}")]].concat())
    };
    for address in ["127.0.0.1", CARD, ROUTER] {
        let ran = ask(address);
        assert_ne!(ran.code, Some(0), "{address}: {}", ran.out);
        assert!(!ran.out.contains("secret") && ran.err.contains("not reached"), "{}", ran.err);
    }
    // With the host's network, the address works.
    let host = ["run", "--quiet", "--network", "host", "a", "--", "perl", "/ask"];
    let ran = place.run_each(&[&host[..], &[&format!("127.0.0.1:{port}")]].concat());
    assert_eq!(ran.out, "secret\n", "{}", ran.err);
}

/// Only pasta can reach a name server at the host's loopback.
#[test]
fn a_name_server_at_the_hosts_loopback_is_reached() {
    let Some(place) = with_network() else { return };
    fs::write(place.path("resolver"), "search a.test\nnameserver 127.0.0.1\n").unwrap();
    let server = UdpSocket::bind("127.0.0.1:53").unwrap();
    std::thread::spawn(move || {
        let mut bytes = [0; 600];
        while let Ok((length, peer)) = server.recv_from(&mut bytes) {
            // The packet is a reply to pasta's question.
            bytes[2] |= 0x80;
            let _left = server.send_to(&bytes[..length], peer);
        }
    });
    // A question has at least twelve bytes. Source: RFC 1035, 4.1.1.
    let script = "cat /etc/resolv.conf; perl /ask 169.254.1.1:53 \"$(printf 'Aquestion:for:it')\" ";
    let words = ["run", "--quiet", "--network", "pasta", "a", "--", "sh", "-c", script];
    let bind = "mount --bind resolver /etc/resolv.conf && exec \"$@\"";
    let Some(ran) = in_own_mounts(&place, bind, &words) else { return };
    let expect = "search a.test\nnameserver 169.254.1.1\nAq\u{fffd}estion:for:it";
    assert_eq!(ran.out, expect, "{}", ran.err);
}

#[test]
fn nobody_connects_roots_containers() {
    let Some(place) = with_network() else { return };
    open_tun(&place);
    let user = |options: &[&str]| {
        let _guard = Rm(&place, "c");
        start(&place, &[&["--name", "c"], options].concat(), "sleep 100");
        let process = pasta(&place, "c").unwrap();
        let map = fs::read_to_string(process.join("uid_map")).unwrap();
        let map: Vec<_> = map.split_whitespace().map(str::to_owned).collect();
        // The open files of pasta are files of the kernel, pasta's own files, or files that Quire passed to it.
        for entry in fs::read_dir(process.join("fd")).unwrap() {
            let open = fs::read_link(entry.unwrap().path()).unwrap().display().to_string();
            let known = ["/dev/null", "pipe:", "socket:", "anon_inode:", "/dev/net/tun", "net:"];
            let own = ["/run/quire/userns"];
            let is_known = known.iter().any(|it| open.starts_with(it))
                || own.iter().any(|it| open.contains(it));
            assert!(is_known, "{open}");
        }
        let rights = u64::from_str_radix(&status(&process, "CapEff")[0], 16).unwrap();
        (status(&process, "Uid")[1].clone(), rights, map)
    };
    let (uid, _, map) = user(&["--network", "pasta"]);
    assert_eq!((&*uid, map), ("2147418112", ["0", "2147418112", "1"].map(str::to_owned).to_vec()));
    let (uid, _, _) = user(&["--publish", "8080:80"]);
    assert_eq!(uid, "2147418112");
    // The mapped user may not listen at this port, so pasta runs as root with few capabilities.
    let (uid, rights, _) = user(&["--publish", "80:80"]);
    assert_eq!(uid, "0");
    // The bits are CAP_SYS_ADMIN and CAP_NET_BIND_SERVICE. Source: Linux `include/uapi/linux/capability.h`.
    assert!(rights & !(1 << 21 | 1 << 10) == 0, "{rights:x}");
}

#[test]
fn pasta_ends_with_its_container_and_not_the_other_way_round() {
    let Some(place) = with_network() else { return };
    let options = ["--name", "c", "--network", "pasta"];
    for (end, is_open) in [("stop", false), ("kill", false), ("kill", true), ("stop", true)] {
        if is_open && end == "kill" {
            // From here on pasta runs as an unprivileged user.
            open_tun(&place);
        }
        let _guard = Rm(&place, "c");
        start(&place, &options, "sleep 100");
        let process = pasta(&place, "c").unwrap();
        match end {
            "stop" => drop(place.out("stop --time 0 c")),
            _ => {
                let state = fs::read(place.path("store/containers/c/state.json")).unwrap();
                let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
                let monitor = state["monitor"].as_i64().unwrap().try_into().unwrap();
                let monitor = rustix::process::Pid::from_raw(monitor).unwrap();
                rustix::process::kill_process(monitor, rustix::process::Signal::KILL).unwrap();
            }
        }
        wait_for("its end", || !process.exists());
    }
    let ran = place.run("run --network pasta a -- true");
    assert!(ran.code == Some(0) && ran.err.is_empty(), "{}", ran.err);
    let left = fs::read_dir(place.path("store/containers")).unwrap();
    let left: Vec<_> = left.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    // The container that was kept is removed with its name.
    assert!(left.iter().all(|it| it == "c" || it.starts_with('.')), "{left:?}");
    let _guard = Rm(&place, "c");
    start(&place, &options, "sleep 100");
    let process = pasta(&place, "c").unwrap();
    let number = process.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let number = rustix::process::Pid::from_raw(number).unwrap();
    rustix::process::kill_process(number, rustix::process::Signal::KILL).unwrap();
    // A killed process ends only after it has closed its files, and the kernel may take long to remove its interface.
    // The monitor may reap it or leave it as a zombie.
    let has_ended = || {
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ")
    };
    wait_for("the end of pasta", has_ended);
    assert_eq!(place.out("exec c cat /etc/short"), "short\n");
    place.out("stop --time 0 c");
    wait_for("the remark", || {
        place.run("logs c").err.contains("pasta exited before the container")
    });
}

#[test]
fn what_cannot_be_connected_is_refused_before_anything_is_made() {
    let Some(place) = with_network() else { return };
    let ended = |ran: Ran, code, said: &str| {
        assert!(ran.code == Some(code) && ran.err.contains(said), "{said}: {}", ran.err);
    };
    let refused = |ran: Ran, said: &str| ended(ran, 125, said);
    // Podman has the same code.
    let in_use = |ran: Ran, said: &str| ended(ran, 126, said);
    let _taken = TcpListener::bind("127.0.0.1:8080").unwrap();
    let run = |options: &str| place.run(&format!("run --quiet {options} a -- true"));
    in_use(
        run("-p 127.0.0.1:8079-8080:80-81"),
        "port 8080 of the host's address 127.0.0.1: address already in use",
    );
    in_use(
        run("-p 8080:80"),
        "--publish 8080:80: cannot listen on port 8080 of the host: address already in use",
    );
    let twice = "-p 127.0.0.1:9000-9005:80-85 -p 192.0.2.1:9005:90";
    refused(run(twice), "--publish 192.0.2.1:9005:90: port 9005 of the host is already published");
    // With this many ports, two random choices would collide.
    let ran = run("-p 8000-8150");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    refused(run("-p 203.0.113.1:8080:80"), "the host does not have this address");
    for network in ["none", "host"] {
        let ran = place.run(&format!("run -p 8081:80 --network {network} a -- true"));
        let said = format!("--publish has no effect with --network {network}");
        assert!(ran.code == Some(0) && ran.err.contains(&said), "{}", ran.err);
    }
    let ran = place.run("run -p  a -- cat /proc/net/dev");
    assert!(ran.code == Some(0) && !ran.out.contains("card0"), "{}{}", ran.out, ran.err);
    let ran = place.run("bundle --network pasta a out");
    assert!(ran.code == Some(2) && ran.err.contains("`bundle` starts no programs"), "{}", ran.err);
    let hide = "mount --bind /dev/null /usr/bin/pasta && exec \"$@\"";
    let words = ["run", "--network", "pasta", "a", "true"];
    if let Some(ran) = in_own_mounts(&place, hide, &words) {
        refused(ran, "package passt");
    }
    // The error is pasta's own.
    assert!(
        Command::new(program("ip").unwrap())
            .args(["route", "delete", "default"])
            .status()
            .unwrap()
            .success()
    );
    assert!(
        Command::new(program("ip").unwrap())
            .args(["link", "delete", "card0"])
            .status()
            .unwrap()
            .success()
    );
    let ran = run("--network pasta");
    assert!(ran.err.contains("pasta cannot connect the container"), "{}", ran.err);
    assert_eq!(ran.code, Some(125));
    assert!(!ran.err.contains("gave no reason"), "{}", ran.err);
    assert_eq!(place.out("ps --all --quiet"), "");
}
