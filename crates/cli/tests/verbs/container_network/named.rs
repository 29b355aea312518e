//! Networks of several containers: `network`, and `run --network NAME`. The tests need root, to make a network
//! namespace that represents the host's network: bridges and rules of the firewall disappear with it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU64;
use std::path::Path;
use std::process::{Command, Stdio};

use kernel::mount::TmpfsOptions;
use serde_json::Value;

use crate::container_life::containers::{Rm, ps};
use crate::container_life::runs::{place, runtimes, wait_for};
use crate::container_network::pasta::{add_network, answer, own_network};
use crate::{Place, program};

/// Whether netavark and aardvark-dns are installed.
pub(crate) fn has_netavark() -> bool {
    let has = |name: &str| {
        let folders = ["/usr/lib/podman", "/usr/libexec/podman", "/usr/local/libexec/podman"];
        folders.iter().any(|it| Path::new(it).join(name).exists())
    };
    if has("netavark") && has("aardvark-dns") {
        return true;
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "CI has no netavark: packages netavark, aardvark-dns"
    );
    testing::skipped("netavark and aardvark-dns are not installed");
    false
}

/// Returns a place with an image `a` that has Perl, a server and a client, in a network like a host's. Its state is not
/// that of the host's networks.
fn with_networks() -> Option<Place> {
    if !has_netavark() {
        return None;
    }
    let place = place()?;
    add_network(&place.path("tree"))?;
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    if !own_network() {
        return None;
    }
    own_state();
    Some(place)
}

/// Hides the state of the host's networks from this thread and the programs that it starts.
fn own_state() {
    fs::create_dir_all("/run/quire").unwrap();
    let bytes = NonZeroU64::new(16 << 20);
    let options = TmpfsOptions { name: "test", bytes, inodes: None, mode: 0o755 };
    kernel::mount::tmpfs(&options).unwrap().attach_at(Path::new("/run/quire")).unwrap();
}

/// Starts a server in a network.
fn serve(place: &Place, name: &str, options: &[&str]) {
    let before = ["run", "--quiet", "--detach", "-u", "0", "--name", name];
    let ran = place
        .run_each(&[&before[..], options, &["a", "--", "perl", "/serve", "tcp", "80"]].concat());
    assert_eq!(ran.code, Some(0), "{name}: {}", ran.err);
}

/// Asks the server at an address from another container, until it replies.
fn ask(place: &Place, options: &[&str], address: &str) -> String {
    let mut heard = String::new();
    wait_for("a reply of a container", || {
        let words = [&["run", "--quiet"][..], options, &["a", "--", "perl", "/ask", address]];
        let ran = place.run_each(&words.concat());
        // The server may not listen yet.
        let is_early = ran.err.contains("not reached");
        assert!(ran.code == Some(0) || is_early, "{options:?} {address}: {}", ran.err);
        heard = ran.out;
        !heard.is_empty()
    });
    heard
}

/// Whether a process runs. One that its parent has not reaped does not.
pub(crate) fn runs(process: &Path) -> bool {
    fs::read(process.join("cmdline")).is_ok_and(|it| !it.is_empty())
}

/// Kills the process with this number.
pub(crate) fn kill(pid: &Value) {
    let pid = i32::try_from(pid.as_i64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Names of the bridges in this thread's network.
fn bridges() -> Vec<String> {
    let mut ip = Command::new(program("ip").unwrap());
    let out = ip_output(ip.args(["-o", "link", "show", "type", "bridge"]));
    out.lines().filter_map(|it| it.split(": ").nth(1)).map(str::to_owned).collect()
}

fn ip_output(command: &mut Command) -> String {
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

/// Rules of the firewall that name an address.
fn rules(address: &str) -> Vec<String> {
    let mut rules = Vec::new();
    for table in ["nat", "filter"] {
        let Some(iptables) = program("iptables") else { continue };
        let out = ip_output(Command::new(iptables).args(["-t", table, "-S"]));
        rules.extend(out.lines().filter(|it| it.contains(address)).map(str::to_owned));
    }
    rules
}

fn left_of_networks() -> Vec<String> {
    let names = |name: &str| {
        let listed = fs::read_dir(Path::new("/run/quire/networks").join(name));
        listed.into_iter().flatten().map(|it| it.unwrap().file_name().into_string().unwrap())
    };
    let dns = names("netavark/aardvark-dns").filter(|it| it != "aardvark.pid");
    names("attached").chain(names("ns")).chain(dns).chain(bridges()).collect()
}

/// The case that counts: a job and its database.
#[test]
fn a_job_reaches_its_database_by_name() {
    let Some(place) = with_networks() else { return };
    place.out("network create --subnet 10.90.77.0/24 shop");
    for runtime in runtimes() {
        let network = ["--runtime", runtime, "--network", "shop"];
        let _guard = Rm(&place, "db");
        let database =
            [&network[..], &["--network-alias", "database", "-h", "dbhost", "-p", "8080:80"]];
        serve(&place, "db", &database.concat());
        for name in ["db", "database", "dbhost", "db.dns.podman"] {
            let heard = ask(&place, &network, &format!("{name}:80"));
            assert_eq!(heard, "hello from 80\n", "{runtime} {name}");
        }
        assert_eq!(answer("10.90.77.1:8080"), "hello from 80\n", "{runtime}");
        assert!(place.out("port db").contains("80/tcp -> 0.0.0.0:8080"), "{runtime}");
        let described: Value = serde_json::from_str(&place.out("inspect db")).unwrap();
        let settings = &described[0]["NetworkSettings"];
        let address = settings["Networks"]["shop"]["IPAddress"].as_str().unwrap().to_owned();
        assert!(address.starts_with("10.90.77."), "{settings}");
        assert_eq!(settings["IPAddress"], *address);
        assert_eq!(settings["Networks"]["shop"]["Gateway"], "10.90.77.1");
        assert_eq!(settings["Networks"]["shop"]["IPPrefixLen"], 24);
        let listed = place.out("ps --filter network=shop --format {{.Names}}:{{.Networks}}");
        assert_eq!(listed, "db:shop\n");
        let hosts = place.out("exec db cat /etc/hosts");
        assert!(hosts.contains(&format!("{address}\tdbhost db\n")), "{hosts}");
        let resolver = place.out("exec db cat /etc/resolv.conf");
        assert!(resolver.starts_with("search dns.podman\nnameserver 10.90.77.1\n"), "{resolver}");
        // Containers without the network do not reach it.
        let words = ["run", "--quiet", "a", "--", "perl", "/ask", &format!("{address}:80")];
        let ran = place.run_each(&words);
        assert!(ran.code != Some(0) && ran.err.contains("not reached"), "{runtime}: {}", ran.err);
        place.out("rm --force db");
        assert_eq!(left_of_networks(), [""; 0], "{runtime}");
        assert_eq!(rules("10.90.77."), [""; 0], "{runtime}");
    }
    place.out("network rm shop");
    assert_eq!(place.out("network ls -q"), "");
}

#[test]
fn a_container_in_two_networks_has_both_addresses() {
    let Some(place) = with_networks() else { return };
    place.out("network create --subnet 10.90.78.0/24 front");
    place.out("network create --subnet 10.90.79.0/24 --gateway 10.90.79.9 --internal back");
    let _guard = Rm(&place, "web");
    serve(&place, "web", &["--network", "front,back"]);
    for network in ["front", "back"] {
        assert_eq!(ask(&place, &["--network", network], "web:80"), "hello from 80\n", "{network}");
    }
    let cards = place.out("exec web cat /proc/net/route");
    let cards: Vec<_> = cards.lines().filter_map(|it| it.split('\t').next()).collect();
    assert!(cards.contains(&"eth0") && cards.contains(&"eth1"), "{cards:?}");
    let other = Rm(&place, "fixed");
    serve(&place, "fixed", &["--network", "back", "--ip", "10.90.79.77"]);
    let show = "network inspect back --format {{.subnets}}";
    assert!(place.out(show).contains("10.90.79.9"), "{}", place.out(show));
    let text = place.out("network inspect back");
    let back: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(back[0]["containers"]["fixed"]["address"], "10.90.79.77/24");
    assert_eq!(back[0]["internal"], true);
    for (options, said) in [
        (&["--network", "back", "--ip", "10.90.79.77"][..], "in use by container fixed"),
        (&["--network", "back", "--ip", "10.90.80.1"], "not an address for a container"),
        (&["--network", "back", "--ip", "10.90.79.9"], "not an address for a container"),
        (&["--network", "back,front", "--ip", "10.90.79.5"], "name one network"),
        (&["--network", "nosuch"], "quire network create nosuch"),
        (&["--ip", "10.90.79.5"], "--ip needs a network"),
        (&["--network-alias", "x"], "--network-alias needs a network"),
        (&["--network", "back,back"], "named twice"),
        (&["--network", "back,host"], "cannot be combined"),
    ] {
        let ran = place.run_each(&[&["run"][..], options, &["a", "true"]].concat());
        assert!(ran.code == Some(125) && ran.err.contains(said), "{options:?}: {}", ran.err);
    }
    let ran = place.run_each(&["network", "rm", "back"]);
    assert!(ran.code == Some(2) && ran.err.contains("uses network back"), "{}", ran.err);
    // As in podman, force also removes the containers.
    place.out("network rm --force back");
    assert_eq!(ps(&place, "fixed"), None);
    assert_eq!(ps(&place, "web"), None);
    drop(other);
    assert_eq!(left_of_networks(), [""; 0]);
}

/// Each end leaves nothing behind.
#[test]
fn networks_end_with_their_containers() {
    let Some(place) = with_networks() else { return };
    place.out("network create --subnet 10.90.81.0/24 brief");
    let nothing = |what: &str| {
        wait_for(what, || left_of_networks().is_empty());
        assert_eq!(rules("10.90.81."), [""; 0], "{what}");
    };
    let network = ["--network", "brief"];
    let ran = place.run_each(&[&["run", "--quiet"][..], &network, &["a", "false"]].concat());
    assert_ne!(ran.code, Some(0));
    nothing("the end in the foreground");
    let ran = place.run_each(&[&["run", "--quiet"][..], &network, &["a", "/no/such"]].concat());
    assert_eq!(ran.code, Some(127), "{}", ran.err);
    nothing("a failed start");
    let _guard = Rm(&place, "kept");
    serve(&place, "kept", &[&network[..], &["-p", "8081:80"]].concat());
    assert_eq!(bridges().len(), 1);
    let ran = place.run_each(&["run", "-p", "8081:80", "--network", "brief", "a", "true"]);
    assert!(ran.code == Some(126) && ran.err.contains("8081"), "{}", ran.err);
    place.out("stop --time 0 kept");
    nothing("the end of a container that is kept");
    place.out("start kept");
    assert_eq!(ask(&place, &network, "kept:80"), "hello from 80\n");
    place.out("restart --time 0 kept");
    assert_eq!(ask(&place, &network, "kept:80"), "hello from 80\n");
    // The monitor is killed: the next command disconnects the container.
    let state = fs::read_to_string(place.path("store/containers/kept/state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    let monitor = state["monitor"].to_string();
    kill(&state["monitor"]);
    wait_for("the death of a monitor", || !runs(&Path::new("/proc").join(&monitor)));
    assert!(!left_of_networks().is_empty());
    place.out("rm --force kept");
    nothing("the removal of a container whose monitor was killed");
    // A container that was only created has no address.
    place.out("create --quiet --name made --network brief a true");
    let _made = Rm(&place, "made");
    nothing("a container that was only created");
    let ran = place.run_each(&["network", "prune", "--force"]);
    assert_eq!((&*ran.out, ran.code), ("", Some(0)), "a created container uses it: {}", ran.err);
    place.out("rm made");
    assert_eq!(place.out("network prune --force"), "brief\n");
}

/// As for volumes.
#[test]
fn without_a_store_there_is_no_network() {
    let place = Place::new();
    for (line, code) in [("network inspect one", 125), ("network rm one", 1)] {
        let ran = place.run(line);
        let said = "there is no network \"one\"";
        assert!(ran.code == Some(code) && ran.err.contains(said), "{line}: {}", ran.err);
    }
    assert_eq!(place.out("network rm --force one"), "");
    assert_eq!(place.run("network exists one").code, Some(1));
}

#[test]
fn a_network_that_is_used_since_the_question_stays() {
    let Some(place) = with_networks() else { return };
    place.out("network create brief");
    place.out("network create idle");
    let mut command = place.command(&["network", "prune"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut errors = child.stderr.take().unwrap();
    let mut asked: Vec<u8> = Vec::new();
    while !asked.ends_with(b"[y/N] ") {
        let mut byte = [0];
        errors.read_exact(&mut byte).unwrap();
        asked.extend(byte);
    }
    place.out("create --quiet --name made --network brief a true");
    let _made = Rm(&place, "made");
    child.stdin.take().unwrap().write_all(b"y\n").unwrap();
    let ran = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "idle\n");
    assert_eq!(place.out("network ls -q"), "brief\n");
}

#[test]
fn networks_are_listed_and_removed() {
    let Some(place) = place() else { return };
    place.out("network create --label app=shop --subnet 198.51.100.0/24 one");
    let name = place.out("network create --disable-dns");
    assert!(name.starts_with("network-"), "{name}");
    place.out("network create --ignore one");
    assert_eq!(place.out("network ls -q --filter label=app"), "one\n");
    let table = place.out("network ls");
    assert!(table.starts_with("NETWORK ID") && table.contains("bridge"), "{table}");
    let format = "network ls --format {{.Name}}:{{.Driver}} --filter name=one";
    assert_eq!(place.out(format), "one:bridge\n");
    let all: Value = serde_json::from_str(&place.out("network ls --json")).unwrap();
    let subnets: Vec<_> = all.as_array().unwrap().iter().map(|it| &it["subnet"]).collect();
    assert!(subnets.contains(&&Value::from("198.51.100.0/24")), "{all}");
    assert!(subnets.iter().any(|it| it.as_str().unwrap().starts_with("10.")), "{all}");
    assert_eq!(place.run_each(&["network", "exists", "one"]).code, Some(0));
    assert_eq!(place.run_each(&["network", "exists", "two"]).code, Some(1));
    for (words, said) in [
        (&["create", "one"][..], "network one already exists"),
        (&["create", "host"], "a kind of network"),
        (&["create", "../x"], "not a name of a network"),
        (&["create", "--subnet", "198.51.100.128/25", "two"], "overlaps with network one"),
        (&["create", "--subnet", "fd00::/64", "two"], "IPv4 subnet"),
        (&["create", "--gateway", "10.1.1.1", "two"], "--gateway needs --subnet"),
        (&["rm", "two"], "there is no network"),
        (&["inspect", "two"], "there is no network"),
        (&["ls", "--subnet", "10.1.1.0/24"], "--subnet is for `quire network create`"),
    ] {
        let ran = place.run_each(&[&["network"], words].concat());
        let code = if words[0] == "rm" { 1 } else { 125 };
        assert!(ran.code == Some(code) && ran.err.contains(said), "{words:?}: {}", ran.err);
    }
    // A damaged record is found and can be removed.
    fs::write(place.path("store/networks/bad"), "{}").unwrap();
    let ran = place.run_each(&["fsck"]);
    assert!(ran.code == Some(1) && ran.out.contains("network bad"), "{}{}", ran.out, ran.err);
    place.out("network rm bad");
    assert_eq!(place.run_each(&["fsck"]).code, Some(0));
    place.out("network prune --force");
    assert_eq!(place.out("network ls -q"), "");
}

/// Without the programs, the error names the packages.
#[test]
fn missing_programs_are_named() {
    let Some(place) = place() else { return };
    place.out("network create n");
    let hide = "for at in /usr/lib/podman /usr/libexec/podman; do \
                test ! -d $at || mount -t tmpfs none $at; done; exec \"$@\"";
    let words = ["run", "--network", "n", "a", "true"];
    let Some(ran) = crate::container_life::runs::in_own_mounts(&place, hide, &words) else {
        return;
    };
    assert!(ran.code == Some(125) && ran.err.contains("packages netavark and"), "{}", ran.err);
}
