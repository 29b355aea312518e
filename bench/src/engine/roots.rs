//! Time to prepare and to remove the roots of containers, and to start many containers at once.

use std::process::Command;

use anyhow::Result;
use rig::process::quiet;

use super::kind::Kind;
use super::node::Node;
use super::{MOST_ASIDE, Stage};
use crate::measure::{Contestant, Outcome, Rules};
use crate::report::Table;
use crate::samples::Sample;

/// Number of roots.
const ROOTS: usize = 50;

/// The contestants, Quire first.
const KINDS: [Kind; 3] = [Kind::Quire, Kind::Overlayfs, Kind::Erofs];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Made,
    Removed,
    /// Running containers.
    Started,
}

pub(super) const PARTS: [Part; 3] = [Part::Made, Part::Removed, Part::Started];

/// Number of containers in a burst, and number of concurrent starts in the client.
const STARTS: usize = 100;
const AT_A_TIME: usize = 20;

impl Part {
    pub(super) fn title(self) -> String {
        match self {
            Self::Made => format!("{ROOTS} roots: made"),
            Self::Removed => format!("{ROOTS} roots: removed"),
            Self::Started => format!("{STARTS} containers, {AT_A_TIME} at a time: started"),
        }
    }
}

pub(super) fn race(stage: &Stage<'_>, sample: &Sample, part: Part, title: String) -> Result<Table> {
    stage.context.make_room(MOST_ASIDE)?;
    let nodes: Vec<_> = KINDS.iter().map(|it| Node::new(stage, *it)).collect();
    let mut contestants = Vec::new();
    for node in &nodes {
        let commands = move || -> Result<Vec<Command>> {
            let all = 0..ROOTS;
            match part {
                Part::Made => {
                    let top = node.top()?;
                    Ok(all.map(|it| node.prepare(it, &top)).collect())
                }
                Part::Removed => Ok(all.map(|it| node.drop_root(it)).collect()),
                Part::Started => {
                    let image = stage.image(sample, node.kind, "1");
                    Ok(vec![node.run_at_once(&image, STARTS, AT_A_TIME, &["sleep", "1000"])?])
                }
            }
        };
        let contestant = Contestant::new(node.kind.name(), commands).before(move || {
            node.start_anew()?;
            quiet(&mut node.pull(&stage.image(sample, node.kind, "1")))?;
            if part == Part::Removed {
                let top = node.top()?;
                for number in 0..ROOTS {
                    quiet(&mut node.prepare(number, &top))?;
                }
            }
            rustix::fs::sync();
            Ok(())
        });
        contestants.push(contestant.services(|| node.spent()).after(move || {
            if part == Part::Started {
                (0..STARTS).for_each(|it| node.end(it));
            }
            node.stop()
        }));
    }
    Rules::new(stage.context.runs).race(title, contestants)
}

/// Difference between Quire and each other contestant, per root.
pub(super) fn each(table: &Table) -> Vec<String> {
    let Some((ours, others)) = table.outcomes.split_first() else { return Vec::new() };
    let line = |it: &Outcome| {
        let more = (ours.milliseconds() - it.milliseconds()) / ROOTS as f64;
        format!("{}: {}: {more:+.2} ms for each, beside {}", table.title, ours.name, it.name)
    };
    others.iter().map(line).collect()
}
