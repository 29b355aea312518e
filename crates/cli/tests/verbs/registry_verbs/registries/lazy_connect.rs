//! The connection of the lazy service that exists before a program reads.

use std::fs;
use std::time::Duration;

use testing::fake::{Server, forward, wait_for};

use super::lazy::{Stage, names};
use crate::services::served::{end, serve};

/// Time in which the service has read a response that the registry has sent.
const ARRIVAL: Duration = Duration::from_millis(500);

#[test]
fn the_first_reader_finds_a_connection_to_the_registry() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let upstream = stage.daemon.host.clone();
    let server = Server::start(move |request, _| forward(&upstream, request, 0).unwrap());
    let mut service = serve(&to);
    to.out(&format!("pull --quiet --lazy=require {}/team/app:1 app", server.host()));
    let pulled = server.seen().len();
    let asked = || server.seen().split_off(pulled);
    fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    wait_for("the connection", || !asked().is_empty());
    std::thread::sleep(ARRIVAL);
    assert_eq!(fs::read_to_string(to.path("root/file-7")).unwrap(), "7 ".repeat(99));
    let (first, rest) = (asked().remove(0), asked().split_off(1));
    assert!(first.method == "HEAD" && first.path.contains("/blobs/"), "{first:?}");
    assert!(rest.iter().all(|it| it.method == "GET"), "{rest:?}");
    // The windows and the first span are requested at the same time.
    assert!(rest[..2].iter().any(|it| it.connection == first.connection), "{rest:?}");
    to.out("umount root");
    // A complete device needs no connection.
    to.out("mount --lazy --complete app root");
    let device = names(&stage.from, "data").remove(0);
    wait_for("all of the image", || names(&to, "data").contains(&device));
    to.out("umount root");
    end(&to, &mut service);
    let before = server.seen().len();
    let mut service = serve(&to);
    to.out("mount --lazy app root");
    assert_eq!(fs::read_to_string(to.path("root/file-7")).unwrap(), "7 ".repeat(99));
    to.out("umount root");
    end(&to, &mut service);
    assert_eq!(server.seen().len(), before);
}
