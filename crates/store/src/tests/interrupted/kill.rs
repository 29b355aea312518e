//! `kill -9` at random moments.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::tests::{
    NOW, Random, check, check_clean, import, import_as, name, open, sample, setting,
};
use crate::{Form, OpenOptions, Store};

const DIRECTORY: &str = "QUIRE_STORE_TEST_DIRECTORY";
const TASK: &str = "QUIRE_STORE_TEST_TASK";

/// Runs a task in another process, which executes this test binary again.
pub(in crate::tests) fn spawn(directory: &Path, task: &str, umask: Option<&str>) -> Child {
    let binary = std::env::current_exe().unwrap();
    let mut command = match umask {
        None => Command::new(&binary),
        Some(umask) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")]).arg(&binary);
            shell
        }
    };
    command
        .args(["--exact", "tests::interrupted::kill::in_a_child", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(TASK, task)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// As [`spawn`], and waits for the end of the process.
pub(in crate::tests) fn child(directory: &Path, task: &str, umask: Option<&str>) {
    assert!(spawn(directory, task, umask).wait().unwrap().success(), "{task}");
}

#[test]
#[ignore = "what the children of other tests do"]
fn in_a_child() {
    let (Some(directory), Some(task)) = (setting(DIRECTORY), setting(TASK)) else { return };
    let store = open(Path::new(&directory));
    match task.as_str() {
        "import-once" => drop(import(&store, "once", &sample("once", 3)).unwrap()),
        "import" => loop_over(&store, false),
        "import-and-collect" => loop_over(&store, true),
        "snapshots" => super::container_snapshots::publish_forever(&store),
        // Publishes the ref before its objects. The test must detect that.
        "broken" => loop {
            for file in std::fs::read_dir(Path::new(&directory).join("objects")).unwrap() {
                drop(std::fs::remove_dir_all(file.unwrap().path()));
            }
            // The store is opened again, because an open store would use the directories that were just removed.
            import(&open(Path::new(&directory)), "broken", &sample("broken", 20)).unwrap();
        },
        other => panic!("{other}"),
    }
}

/// Imports forever. Some samples are synced file by file, and others all at once.
fn loop_over(store: &Store, collect: bool) {
    for round in 0_usize.. {
        let files = sample(&format!("sample-{}", round % 5), if round % 2 == 0 { 3 } else { 30 });
        let form = if round % 3 == 2 { Form::Packed } else { Form::Objects };
        let ref_name = format!("name-{}", round % 4);
        if round % 5 == 4 {
            let pattern = ["abc.d", "a.Xcd-e", "dcba", "...a-a"][round / 5 % 4];
            crate::tests::pieces::import_pieces(store, &ref_name, &[("file", pattern)]).unwrap();
        } else {
            import_as(store, &ref_name, &files, form).unwrap();
        }
        if collect {
            // Another process may have removed the ref.
            drop(store.remove_ref(&name(&format!("name-{}", (round + 2) % 4))));
            store.gc(NOW).unwrap();
        }
    }
}

/// Runs tasks for a moment, kills them, and checks the store.
fn kill_after(
    directory: &Path,
    tasks: &[&str],
    moment: Duration,
) -> Result<usize, crate::tests::Failure> {
    let children: Vec<_> = tasks.iter().map(|task| spawn(directory, task, None)).collect();
    std::thread::sleep(moment);
    // All children are killed before the first status is checked, because a failure removes the store while others
    // still run.
    let ended = children.into_iter().map(|mut child| {
        child.kill().unwrap();
        child.wait().unwrap()
    });
    for status in ended.collect::<Vec<_>>() {
        assert_eq!(status.signal(), Some(9), "a child ended by itself: {status}");
    }
    // If the child was killed before it made a store, there may be no store, or only a part of one.
    let store = Store::open(directory, crate::Who::this_process(), OpenOptions::create())?;
    let found = check(&store)?;
    if check_clean(&store)? != found {
        return Err("gc changed a ref".into());
    }
    Ok(found.len())
}

/// Returns the time that a child needs for one small import on this machine, including its start.
fn one_import() -> Duration {
    let directory = TempDir::new().unwrap();
    let start = Instant::now();
    child(directory.path(), "import-once", None);
    start.elapsed()
}

#[test]
fn kill_9_at_random_moments_loses_nothing() {
    if !testing::long_tests() {
        return;
    }
    let kills = setting("QUIRE_STORE_KILLS").map_or(20, |it| it.parse().unwrap());
    let directory = TempDir::new().unwrap();
    let mut random = Random::new(u64::from(std::process::id()));
    let hundredth = one_import() / 100;
    let mut refs = 0;
    for _ in 0..kills {
        let moment = hundredth * u32::try_from(20 + random.below(230)).unwrap();
        let tasks = ["import", "import-and-collect", "snapshots"];
        refs += kill_after(directory.path(), &tasks, moment).unwrap();
    }
    assert!(refs > 0, "no import was ever complete");
}

#[test]
fn the_kill_test_finds_a_store_that_is_broken() {
    let directory = TempDir::new().unwrap();
    let tenth = one_import() / 10;
    let found = (8..60).any(|at| kill_after(directory.path(), &["broken"], tenth * at).is_err());
    assert!(found);
}
