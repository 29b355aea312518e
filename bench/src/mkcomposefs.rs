//! Conversion of a dump of a developer's root into an image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::inputs::{self, sid};
use rig::{Failed, tools};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let dump = inputs::dump(context.cache, "cs9-developer")?;
    let tools = Tools {
        ours: crate::named(context, "mkcomposefs")?,
        c: sid::make(context.cache, false)?,
        of_crate: tools::built_composefs_crate()?,
    };
    let mut findings = Vec::new();
    let mut tables = vec![table(context, &tools, "As it is", &dump, &mut findings)?];
    // The crate can only name an object by its digest, which this dump lacks.
    let renamed = context.work.join("renamed.dump");
    fs::write(&renamed, objects_by_digest(&fs::read(&dump)?))?;
    if tools.of_crate.is_some() {
        tables.push(table(context, &tools, "Objects named by digest", &renamed, &mut findings)?);
    } else {
        findings.push(String::from("the `composefs` crate's writer is not built: cargo xtask oracle mkcomposefs --composefs-crate"));
    }
    Ok(Report {
        name: "mkcomposefs",
        about: String::from(
            "`mkcomposefs --from-file DUMP IMAGE`: 64,246 entries of a developer's root filesystem, warm cache, no sync.",
        ),
        tables,
        sizes: Vec::new(),
        findings,
    })
}

struct Tools {
    ours: PathBuf,
    c: sid::Sid,
    of_crate: Option<PathBuf>,
}

fn table(
    context: &Context<'_>,
    tools: &Tools,
    title: &str,
    dump: &Path,
    findings: &mut Vec<String>,
) -> Result<Table> {
    let call = &|mut command: Command, image: &str| {
        command.arg("--from-file").arg(dump).arg(context.work.join(image));
        command
    };
    let mut contestants = vec![
        Contestant::new("Quire", || Ok(vec![call(Command::new(&tools.ours), "ours")])),
        Contestant::new("composefs (C)", || Ok(vec![call(tools.c.command("mkcomposefs")?, "c")])),
    ];
    if let Some(program) = &tools.of_crate {
        // The first call tests whether the program can convert the dump.
        if call(Command::new(program), "crate").output()?.status.success() {
            contestants.push(Contestant::new("composefs crate", move || {
                Ok(vec![call(Command::new(program), "crate")])
            }));
        } else {
            findings.push(format!("{title}: the `composefs` crate refuses this dump"));
        }
    }
    let rules = Rules {
        runs: context.runs,
        sync: None,
        cold: false,
        pace: Pace::Turns,
        memory: Memory::LargestProcess,
    };
    let outcomes = measure(&rules, &mut contestants)?;
    drop(contestants);
    if fs::read(context.work.join("ours"))? != fs::read(context.work.join("c"))? {
        bail!(Failed(String::from("the images of Quire and of C differ")));
    }
    findings.push(format!("{title}: the images of Quire and of C are identical"));
    let others = ["composefs (C)", "composefs crate"];
    let ratios = others.iter().filter_map(|theirs| ratio(&outcomes, "Quire", theirs));
    findings.extend(ratios.map(|it| format!("{title}: {it}")));
    let title = format!("cs9-developer: {}", title.to_lowercase());
    Ok(Table { title, memory: rules.memory, runs: rules.runs, outcomes })
}

/// Uses the names of this dump's objects, which are `xx/rest.file`, as digests, without the slash and the suffix.
fn objects_by_digest(dump: &[u8]) -> Vec<u8> {
    let lines = dump.split(|it| *it == b'\n').map(|line| {
        let mut fields: Vec<_> = line.split(|it| *it == b' ').map(<[u8]>::to_vec).collect();
        if let Some(object) = fields.get(8).and_then(|it| it.strip_suffix(b".file")) {
            let object = object.to_vec();
            fields[10] = object.iter().filter(|it| **it != b'/').copied().collect();
            fields[8] = object;
        }
        fields.join(&b' ')
    });
    lines.collect::<Vec<_>>().join(&b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_get_digests_and_nothing_else_changes() {
        let dump =
            b"/ 1 40755 2 0 0 0 0.0 - - -\n/a 9 100644 1 0 0 0 0.0 ab/cdef.file - - user.a=b\n";
        let expect =
            b"/ 1 40755 2 0 0 0 0.0 - - -\n/a 9 100644 1 0 0 0 0.0 ab/cdef - abcdef user.a=b\n";
        assert_eq!(objects_by_digest(dump), expect);
    }
}
