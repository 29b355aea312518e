//! Network namespaces of a test: a hub, and nodes that it connects. They end with the test.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Address of the hub.
pub(super) const HUB: &str = "10.77.0.1";

/// Returns the address of a node.
pub(super) fn address(node: usize) -> String {
    format!("10.77.0.{}", node + 10)
}

/// A network namespace, which a process keeps.
pub(super) struct Namespace {
    keeper: Child,
    file: File,
}

impl Namespace {
    /// `None` if this machine allows no namespace.
    fn new() -> Option<Self> {
        // The process ends with its standard input, so also if this process is killed.
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "echo made && exec cat"]);
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
        let mut line = String::new();
        BufReader::new(keeper.stdout.take()?).read_line(&mut line).ok()?;
        if line.trim() != "made" {
            let _ended = keeper.kill().and_then(|()| keeper.wait());
            return None;
        }
        let file = File::open(format!("/proc/{}/ns/net", keeper.id())).unwrap();
        let namespace = Self { keeper, file };
        namespace.ip("link set lo up").then_some(namespace)
    }

    /// Runs `work` in a thread in this namespace. Processes and threads that it starts are in the namespace as well.
    pub(super) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(self.file.as_fd(), kind).unwrap();
            work()
        };
        let ended = thread::scope(|scope| scope.spawn(inside).join());
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Calls ip(8). Returns whether it succeeds.
    fn ip(&self, line: &str) -> bool {
        let Some(program) = testing::find_program("ip") else { return false };
        let run = || Command::new(program).args(line.split(' ')).status();
        self.within(run).is_ok_and(|it| it.success())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.keeper.kill().and_then(|()| self.keeper.wait());
    }
}

/// A hub with a bridge, and nodes with an interface each.
pub(super) struct Lan {
    pub(super) hub: Namespace,
    pub(super) nodes: Vec<Namespace>,
}

impl Lan {
    /// `None`, with a note, if this machine cannot make it.
    pub(super) fn new(nodes: usize) -> Option<Self> {
        if !crate::is_root() || !testing::programs(&["ip", "unshare"]) {
            return None;
        }
        let made = Self::made(nodes);
        if made.is_none() {
            testing::skipped("this machine has no network namespaces, bridges or veth interfaces");
        }
        made
    }

    fn made(nodes: usize) -> Option<Self> {
        let hub = Namespace::new()?;
        let nodes: Vec<_> = (0..nodes).map(|_| Namespace::new()).collect::<Option<_>>()?;
        let bridge = ["link add hub type bridge", "link set hub up"];
        let mut is_made = bridge.iter().all(|it| hub.ip(it));
        is_made &= hub.ip(&format!("addr add {HUB}/24 dev hub"));
        for (number, node) in nodes.iter().enumerate() {
            let (end, pid) = (format!("node{number}"), node.keeper.id());
            is_made = is_made
                && hub.ip(&format!("link add {end} type veth peer name lan netns {pid}"))
                && hub.ip(&format!("link set {end} master hub"))
                && hub.ip(&format!("link set {end} up"))
                && node.ip(&format!("addr add {}/24 dev lan", address(number)))
                && node.ip("link set lan up");
        }
        is_made.then_some(Self { hub, nodes })
    }
}
