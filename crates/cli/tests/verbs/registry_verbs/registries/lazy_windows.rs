//! Windows of an index that are fetched when a program reads for the first time.

use std::fs::{self, File};

use rustix::fs::{FlockOperation, flock};
use testing::fake::wait_for;

use super::lazy::{Stage, names};

#[test]
fn the_first_reader_does_not_wait_for_locks_of_the_store() {
    let Some((stage, to)) = Stage::to_wait_for() else { return };
    let mut service = crate::services::served::serve(&to);
    to.out(&format!("pull --quiet --lazy=require {} app", stage.target));
    fs::create_dir(to.path("root")).unwrap();
    to.out("mount --lazy app root");
    let sizes = || {
        let sizes = names(&to, "lazy").into_iter().map(|name| {
            let path = to.path("store/lazy").join(&name);
            (name, fs::metadata(path).unwrap().len())
        });
        sizes.collect::<Vec<_>>()
    };
    let before = sizes();
    // `gc` holds this lock while it deletes.
    let lock = File::open(to.path("store/gc.lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let path = to.path("root/file-7");
    let reader = std::thread::spawn(move || fs::read_to_string(path).unwrap());
    wait_for("the reader", || reader.is_finished());
    assert_eq!(reader.join().unwrap(), "7 ".repeat(99));
    assert_eq!(sizes(), before);
    flock(&lock, FlockOperation::Unlock).unwrap();
    wait_for("the windows", || sizes() != before);
    to.out("umount root");
    crate::services::served::end(&to, &mut service);
}
