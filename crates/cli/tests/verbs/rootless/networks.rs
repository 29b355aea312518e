//! Networks of several containers for a user who is not root.

use super::*;
use crate::container_network::named::{has_netavark, kill, runs};

/// A job reaches its database, and nothing is left afterwards: neither the process that keeps the networks, nor its
/// files.
#[test]
fn a_job_of_a_user_reaches_its_database() {
    if !has_netavark() {
        return;
    }
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    if add_network(&tree).is_none() || !own_network() {
        return;
    }
    open_tun(&user.place);
    user.import(&tree);
    user.out(&["network", "create", "--subnet", "10.90.91.0/24", "shop"]);
    let ran = user.run(&["run", "--network", "shop", "-p", "8080:80", "a", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("--network pasta"), "{}", ran.err);
    for runtime in runtimes() {
        let network = ["--runtime", runtime, "--network", "shop"];
        let server = ["a", "perl", "/serve", "tcp", "80"];
        for name in ["db", "other"] {
            let before = ["--quiet", "run", "--detach", "--name", name];
            user.out(&[&before[..], &network, &server].concat());
        }
        let mut heard = String::new();
        wait_for("a reply of a container", || {
            let words = [&["--quiet", "run"][..], &network, &["a", "perl", "/ask", "db:80"]];
            let ran = user.run(&words.concat());
            assert!(
                ran.code == Some(0) || ran.err.contains("not reached"),
                "{runtime}: {}",
                ran.err
            );
            heard = ran.out;
            !heard.is_empty()
        });
        assert_eq!(heard, "hello from 80\n", "{runtime}");
        // The host's network has no bridge.
        let cards = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        assert!(!cards.contains("quire-"), "{runtime}: {cards}");
        let described = user.out(&["inspect", "db", "--format", "{{.NetworkSettings.IPAddress}}"]);
        assert!(described.starts_with("10.90.91."), "{runtime}: {described}");
        let keeper = fs::read_to_string(user.home().join("quire/networks/keeper")).unwrap();
        let keeper = PathBuf::from("/proc").join(keeper.split(' ').next().unwrap());
        assert!(runs(&keeper));
        user.out(&["rm", "--force", "db"]);
        assert!(runs(&keeper), "another container needs the networks");
        user.out(&["rm", "--force", "other"]);
        wait_for("the end of the networks", || !runs(&keeper));
        let left = |name: &str| user.home().join("quire/networks").join(name).exists();
        assert!(
            !left("keeper") && !left("attached") && !left("network") && !left("ns"),
            "{runtime}"
        );
    }
    user.out(&["network", "rm", "shop"]);
}

/// If all monitors of a user are killed, the networks end as well.
#[test]
fn networks_of_a_user_end_with_killed_monitors() {
    if !has_netavark() {
        return;
    }
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    if add_network(&tree).is_none() || !own_network() {
        return;
    }
    open_tun(&user.place);
    user.import(&tree);
    user.out(&["network", "create", "--subnet", "10.90.92.0/24", "shop"]);
    let before = ["--quiet", "run", "--detach", "--name", "db", "--network", "shop"];
    user.out(&[&before[..], &["a", "perl", "/serve", "tcp", "80"]].concat());
    let keeper = fs::read_to_string(user.home().join("quire/networks/keeper")).unwrap();
    let keeper = PathBuf::from("/proc").join(keeper.split(' ').next().unwrap());
    let state = user.home().join(".local/share/quire/containers/db/state.json");
    let state: serde_json::Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    kill(&state["monitor"]);
    wait_for("the end of the networks", || !runs(&keeper));
    user.out(&["rm", "--force", "db"]);
    // The networks can be used again.
    let words = ["--quiet", "run", "--network", "shop", "a", "cat", "/etc/resolv.conf"];
    let out = user.out(&words);
    assert!(out.contains("nameserver 10.90.92.1\n"), "{out}");
    user.out(&["network", "prune", "--force"]);
}
