//! Conversion of a dump of a developer's root into an image.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::command::more;
use super::measure::{Contestant, Rules};
use super::report::{Report, Table};
use crate::Context;
use rig::inputs::{self, sid};
use rig::{Failed, tools};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let dump = inputs::dump(context.cache, "cs9-developer")?;
    let ours = crate::named(context, "mkcomposefs")?;
    let c = sid::make(context.cache, false)?;
    let of_crate = tools::built_composefs_crate()?;
    let mut findings = Vec::new();
    let mut table = |title: &str, dump: &Path| -> Result<Table> {
        let call = |command: Command, image: &str| {
            let image = context.work.join(image);
            more!(command, "--from-file {dump} {image}")
        };
        let mut contestants = vec![
            Contestant::new("Quire", || call(Command::new(&ours), "ours")),
            Contestant::new("composefs (C)", || anyhow::Ok(call(c.command("mkcomposefs")?, "c"))),
        ];
        if let Some(program) = &of_crate {
            let command = move || call(Command::new(program), "crate");
            // The first call tests whether the program can convert the dump.
            if command().output()?.status.success() {
                contestants.push(Contestant::new("composefs crate", command));
            } else {
                findings.push(format!("{title}: the `composefs` crate refuses this dump"));
            }
        }
        let page = format!("cs9-developer: {}", title.to_lowercase());
        let table = Rules::new(context.runs).race(page, contestants)?;
        if fs::read(context.work.join("ours"))? != fs::read(context.work.join("c"))? {
            bail!(Failed(String::from("the images of Quire and of C differ")));
        }
        findings.push(format!("{title}: the images of Quire and of C are identical"));
        let others = ["composefs (C)", "composefs crate"];
        let ratios = others.iter().filter_map(|theirs| table.ratio("Quire", theirs));
        findings.extend(ratios.map(|it| format!("{title}: {it}")));
        Ok(table)
    };
    let mut tables = vec![table("As it is", &dump)?];
    if of_crate.is_some() {
        // The crate can only name an object by its digest, which this dump lacks.
        let renamed = context.work.join("renamed.dump");
        fs::write(&renamed, objects_by_digest(&fs::read(&dump)?))?;
        tables.push(table("Objects named by digest", &renamed)?);
    } else {
        findings.push(String::from(
            "the `composefs` crate's writer is not built: cargo xtask oracle mkcomposefs --composefs-crate",
        ));
    }
    Ok(Report {
        name: "mkcomposefs",
        about: String::from(
            "`mkcomposefs --from-file DUMP IMAGE`: 64,246 entries of a developer's root filesystem, warm cache, no sync.",
        ),
        tables,
        findings,
        ..Report::default()
    })
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
