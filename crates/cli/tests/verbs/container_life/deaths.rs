//! Containers whose processes are killed at any moment of start and teardown. Needs root.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::container_disk::writable::is_clean;
use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{cgroups, mounts, place, processes_with, runtimes, wait_for};
use testing::rounds;

/// The processes that are killed.
const VICTIMS: [&str; 4] =
    ["quire", "quire, by Ctrl-C", "everything of quire's and the runtime's", "everything"];
/// Options for additional resources of the container.
const EXTRAS: [&[&str]; 3] = [
    &[],
    &["--userns", "auto"],
    &["--userns", "0:500000:65536", "--mount", "type=self,dst=/tmp,size=16m"],
];

/// Microseconds within which a process is killed. A start and an end together take less.
const MOMENTS: u64 = 60_000;

#[test]
fn a_kill_at_any_moment_leaves_nothing_behind_the_next_command() {
    let Some(place) = place() else { return };
    // Only mounts of this test are counted, because other tests mount at the same time.
    let folder = place.folder.path().to_str().unwrap();
    let mounted = || mounts().lines().filter(|it| it.contains(folder)).count();
    let runtimes: Vec<_> = runtimes().collect();
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..rounds(20) {
        let pick = |random: &mut dyn FnMut(u64) -> u64, of: &[&'static str]| {
            of[usize::try_from(random(of.len() as u64)).unwrap()]
        };
        let victim = pick(&mut random, &VICTIMS);
        let kind = pick(&mut random, &["memory", "self", "none"]);
        let runtime = pick(&mut random, &runtimes);
        let moment = Duration::from_micros(random(MOMENTS));
        let is_detached = random(2) == 0;
        let extra = EXTRAS[usize::try_from(random(EXTRAS.len() as u64)).unwrap()];
        let name = format!("death-{}-{round}", std::process::id());
        let told = format!(
            "{name}: {victim}, {kind}, {runtime}, {moment:?}, detached {is_detached}, {extra:?}"
        );
        let mut arguments =
            vec!["run", "--quiet", "--name", &name, "--writable", kind, "--runtime", runtime];
        arguments.extend(is_detached.then_some("-d"));
        arguments.extend(extra);
        // The container's name is among the program's arguments, so that the program can be found.
        let script = format!(": {name}; sleep 0.02");
        arguments.extend(["a", "--", "sh", "-c", &script]);
        let mut command = place.command(&arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(moment);
        match victim {
            "quire" => child.kill().unwrap(),
            "quire, by Ctrl-C" => {
                let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
                kill_process(pid, Signal::INT).unwrap();
            }
            victim => {
                let mut pids = processes_with(folder);
                if victim == "everything" {
                    pids.extend(processes_with(&name));
                }
                for pid in pids {
                    // The process may have ended by itself, or with another one.
                    let _gone = kill_process(pid, Signal::KILL);
                }
            }
        }
        child.wait().unwrap();
        // The remaining processes may run to their end. After that, the next command removes the leftovers.
        wait_for(&format!("an end of what runs ({told})"), || processes_with(&name).is_empty());
        place.run(&format!("rm --container --force {name}"));
        wait_for(&format!("nothing to be left ({told})"), || {
            let gc = place.run("gc");
            assert_eq!(gc.code, Some(0), "{told}: {}", gc.err);
            is_clean(&place) && cgroups(&name).is_empty()
        });
        assert_eq!(mounted(), 0, "{told}");
    }
    place.out("fsck");
    place.out("verify a");
}

/// As in podman, the removal of one does not depend on that of another.
#[test]
fn many_are_removed_together_and_an_error_keeps_no_other() {
    /// More than are killed at the same time.
    const COUNT: usize = 18;
    let Some(place) = place() else { return };
    let names: Vec<_> = (0..COUNT).map(|it| format!("many-{it}")).collect();
    let _guards: Vec<_> = names.iter().map(|it| Rm(&place, it)).collect();
    for (number, name) in names.iter().enumerate() {
        let mut options = vec!["--name", name];
        if number % 2 == 1 {
            options.push("--rm");
        }
        start(&place, &options, "while :; do sleep 1; done");
    }
    place.out("kill many-0 many-4");
    place.out("wait many-0 many-4");
    let ran = place.run("rm many-0 many-2 many-4");
    assert_ne!(ran.code, Some(0));
    assert_eq!(ran.out, "many-0\nmany-4\n");
    assert!(ran.err.contains("many-2 is running"), "{}", ran.err);
    let rest: Vec<_> = names.iter().filter(|it| *it != "many-0" && *it != "many-4").collect();
    let mut rm = vec!["rm", "--force"];
    rm.extend(rest.iter().map(|it| it.as_str()));
    rm.extend(["many-2", "never-made"]);
    let ran = place.run_each(&rm);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let expect: String = rest.iter().map(|it| format!("{it}\n")).collect();
    assert_eq!(ran.out, expect);
    assert_eq!(place.out("ps --all --quiet"), "");
    wait_for("nothing to be left", || is_clean(&place));
}
