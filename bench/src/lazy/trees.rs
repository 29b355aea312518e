//! Reads and listings of a whole image through its mount.

use anyhow::Result;

use super::{PROFILES, Race, Route, Stage, Start, Way, race};
use crate::command::{cmd, run_all};
use crate::lazy::Found;
use crate::measure::Until;
use rig::process::quiet;

/// State of the image when the clock starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// The image is only in the registry, and its mount is timed.
    Absent,
    Mounted,
    /// The image is mounted and was listed once.
    Listed,
    /// The image is mounted and downloaded: its devices are completed, or each file was read once.
    Here,
}

/// A script over a tree with its title, the initial state, the distances, and whether the page cache is cold.
struct Walk {
    title: &'static str,
    script: &'static str,
    begin: Begin,
    places: &'static [usize],
    is_cold: bool,
}

const LIST: &str = "ls -lR \"$1\" > /dev/null";
const READ: &str = "find \"$1\" -type f -exec cat {} + > /dev/null";

const fn walk(
    title: &'static str,
    script: &'static str,
    begin: Begin,
    places: &'static [usize],
    is_cold: bool,
) -> Walk {
    Walk { title, script, begin, places, is_cold }
}

const WALKS: [Walk; 5] = [
    walk("mounted, everything read", READ, Begin::Absent, &[0, 1, 3], true),
    walk("first ls -lR", LIST, Begin::Mounted, &[1], false),
    walk("second ls -lR", LIST, Begin::Listed, &[1], false),
    walk("complete, cold ls -lR", LIST, Begin::Here, &[0], true),
    walk("complete, everything read cold", READ, Begin::Here, &[0], true),
];

/// The images that are read: a large one and a small one.
const WALKED: [&str; 2] = ["postgres", "nginx"];

/// Titles of an image's tables.
pub(super) fn titles(sample: &str) -> Vec<String> {
    (0..PROFILES.len()).flat_map(|place| titles_at(sample, place)).collect()
}

/// Titles of an image's tables at one distance.
pub(super) fn titles_at(sample: &str, place: usize) -> Vec<String> {
    let walks = WALKS.iter().filter(|it| WALKED.contains(&sample) && it.places.contains(&place));
    walks.map(|it| title(it, sample, place)).collect()
}

fn title(walk: &Walk, sample: &str, place: usize) -> String {
    format!("{}, {sample}, {}", walk.title, PROFILES[place].0)
}

/// Measures an image's tables at one distance.
pub(super) fn walks(
    stage: &Stage<'_>,
    ways: &[&dyn Way],
    start: &Start<'_>,
    place: usize,
    route: &Route,
    found: &mut Found,
) -> Result<()> {
    for walk in WALKS.iter().filter(|it| it.places.contains(&place)) {
        let title = title(walk, start.sample.name, place);
        if !WALKED.contains(&start.sample.name) || !stage.context.wants(&title) {
            continue;
        }
        let walked = |way: &dyn Way, script: &str| cmd!("sh -euc {script} sh", way.tree());
        let prepare = |way: &dyn Way| -> Result<()> {
            if walk.begin == Begin::Absent {
                return Ok(());
            }
            run_all(way.mount(start))?;
            match walk.begin {
                Begin::Listed => quiet(&mut walked(way, LIST)).map(drop),
                Begin::Here if !way.settle(start)? => quiet(&mut walked(way, READ)).map(drop),
                _ => Ok(()),
            }
        };
        let commands = |way: &dyn Way| {
            let mut commands =
                if walk.begin == Begin::Absent { way.mount(start)? } else { Vec::new() };
            commands.push(walked(way, walk.script));
            Ok(commands)
        };
        let can = |way: &dyn Way| -> Result<()> {
            way.before(start)?;
            prepare(way)?;
            run_all(commands(way))
        };
        let mut able = Vec::new();
        for way in ways {
            let tried = if way.is_rival() { can(*way) } else { Ok(()) };
            if way.is_rival() {
                way.after()?;
            }
            match tried {
                Ok(()) => able.push(*way),
                Err(error) => {
                    let text = format!("{error:#}");
                    let line = text.lines().next().unwrap_or_default();
                    println!("{}: {title}: {line}", way.name());
                    found.findings.push(format!("{} cannot do this: {title}", way.name()));
                }
            }
        }
        let (until, is_cold) = (Until::End, walk.is_cold);
        let table = Race { title, until, is_cold, prepare: &prepare, commands: &commands };
        race(stage, &able, start, route, table, found)?;
    }
    Ok(())
}
