//! `history`: lists the steps by which an image was built, newest first.

use std::io::{self, Write};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use store::Store;
use transfer::StoredImage;

use crate::Answer;
use crate::output::report::{self, Bytes, short};
use crate::output::{table, template};
use crate::session::context::{Context, now};
use crate::session::layers;
use crate::session::resolve::resolve;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct History {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Print this Go template of each step, such as {{.CreatedBy}}, or json
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
    /// Print sizes and times for people; with false, in bytes and in RFC 3339
    #[arg(
        short = 'H',
        long,
        value_name = "BOOL",
        default_value_t = true,
        default_missing_value = "true",
        num_args = 0..=1,
        require_equals = true,
        action = clap::ArgAction::Set
    )]
    pub(crate) human: bool,
    /// Show whole ids and commands
    #[arg(long)]
    pub(crate) no_trunc: bool,
    /// Print only ids
    #[arg(short = 'q')]
    pub(crate) ids: bool,
}

impl VerbArgs for History {
    const NAME: &'static str = "history";
    const ABOUT: &'static str = "List the steps by which an image was built";
    const EXAMPLES: &'static str = "quire history debian\n  quire history --no-trunc debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        history(context, self)
    }
}

/// Report of `history --json` on a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct HistoryReport {
    /// Image id for the newest step, and `<missing>` for the others.
    id: String,
    /// Names of the image for the newest step; empty for the others.
    tags: Vec<String>,
    /// Time of the step, as the configuration states it. Null if it states none.
    created: Option<String>,
    /// Command of the step; may be empty.
    created_by: String,
    /// Size of the uncompressed tar of the step's layer; 0 for a step without one.
    size: Bytes,
    /// Comment; may be empty.
    comment: String,
}

/// Id of all steps but the newest one, as in Docker.
const MISSING: &str = "<missing>";

/// Returns the steps of an image, newest first. `sizes` has the sizes of the layers' tars, lowest first.
fn steps(history: &[Value], sizes: &[u64]) -> Vec<HistoryReport> {
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let mut sizes = sizes.iter();
    let mut steps: Vec<_> = history
        .iter()
        .map(|step| {
            let is_empty = step["empty_layer"].as_bool().unwrap_or(false);
            let size = if is_empty { None } else { sizes.next() };
            HistoryReport {
                id: MISSING.to_owned(),
                tags: Vec::new(),
                created: step["created"].as_str().map(str::to_owned),
                created_by: text(&step["created_by"]),
                size: Bytes(size.copied().unwrap_or(0)),
                comment: text(&step["comment"]),
            }
        })
        .collect();
    // A configuration may have no history, or one of fewer layers.
    steps.extend(sizes.map(|size| HistoryReport {
        id: MISSING.to_owned(),
        tags: Vec::new(),
        created: None,
        created_by: String::new(),
        size: Bytes(*size),
        comment: String::new(),
    }));
    steps.reverse();
    steps
}

/// Returns the sizes of the tars of an image's layers, lowest first; 0 if the store does not have a layer.
fn sizes(store: &Store, stored: &StoredImage) -> Vec<u64> {
    let size = |diff_id| store.layers.open(diff_id).ok().flatten().map_or(0, |it| it.info().size);
    stored.config.diff_ids().iter().map(size).collect()
}

fn history(context: &Context, args: &History) -> anyhow::Result<Answer> {
    let store = context.open_with(&args.name)?;
    let found = resolve(&store, &args.name)?;
    let Some(manifest) = &found.manifest else {
        anyhow::bail!(layers::none(&args.name, ""));
    };
    let stored = StoredImage::load(&store, manifest)?;
    let config = stored.config_json()?;
    let history = config["history"].as_array().cloned().unwrap_or_default();
    let mut all = steps(&history, &sizes(&store, &stored));
    if let Some(newest) = all.first_mut() {
        let (refs, _) = store.refs.readable()?;
        let names =
            refs.into_iter().filter(|(name, it)| it.image == found.image && !name.is_unnamed());
        newest.id = found.image.to_string();
        newest.tags = names.map(|(name, _)| name.to_string()).collect();
    }
    if context.json || args.format.as_deref().is_some_and(template::is_json) {
        report::json(&all)?;
        return Ok(Answer::Yes);
    }
    let now = now().0;
    let rows: Vec<_> = all.iter().map(|it| it.row(args, now)).collect();
    if let Some(format) = &args.format {
        let rows: Vec<_> = all.iter().zip(&rows).map(|(it, row)| it.fields(row)).collect();
        template::print(&template::list(format, &rows, &[("ID", "ID")])?)?;
        return Ok(Answer::Yes);
    }
    if args.ids || context.quiet {
        return report::lines(rows.iter().map(|it| it.id.as_str()));
    }
    let mut out = report::standard_output();
    write(&rows, args, &mut out)?;
    out.flush()?;
    Ok(Answer::Yes)
}

/// The cells of a step, for people.
struct HistoryRow {
    id: String,
    created: String,
    created_by: String,
    size: String,
    comment: String,
}

impl HistoryReport {
    fn row(&self, args: &History, now: i64) -> HistoryRow {
        let is_id = self.id != MISSING && !args.no_trunc;
        let since = self.created.as_deref().and_then(report::seconds);
        HistoryRow {
            id: if is_id { short(&self.id) } else { self.id.clone() },
            created: match (args.human, since) {
                (true, Some(at)) => report::ago(now.saturating_sub(at)),
                (true, None) => "?".to_owned(),
                (false, _) => self.created.clone().unwrap_or_else(|| "?".to_owned()),
            },
            created_by: match args.no_trunc {
                true => self.created_by.clone(),
                false => truncated(&self.created_by),
            },
            size: match args.human {
                true => report::size(self.size.0),
                false => report::bytes_alone(self.size.0),
            },
            comment: self.comment.clone(),
        }
    }

    /// Returns the fields for templates, with podman's names.
    fn fields(&self, row: &HistoryRow) -> Value {
        json!({
            "ID": row.id,
            "Created": row.created,
            "CreatedAt": self.created,
            "CreatedSince": row.created,
            "CreatedBy": row.created_by,
            "Size": row.size,
            "Comment": row.comment,
            "Tags": self.tags,
        })
    }
}

/// Shortens a command for the table. Source of the length: podman, `cmd/podman/images/history.go`.
fn truncated(command: &str) -> String {
    const MOST: usize = 45;
    const KEPT: usize = 42;
    if command.chars().count() <= MOST {
        return command.to_owned();
    }
    let kept: String = command.chars().take(KEPT).collect();
    kept + "..."
}

fn write(rows: &[HistoryRow], args: &History, out: &mut dyn Write) -> io::Result<()> {
    let cells = rows.iter().map(|it| {
        vec![
            it.id.clone(),
            it.created.clone(),
            it.created_by.clone(),
            it.size.clone(),
            it.comment.clone(),
        ]
    });
    let cells: Vec<_> = cells.collect();
    let print = if args.no_trunc { table::print_whole } else { table::print };
    print(out, &["ID", "CREATED", "CREATED BY", "SIZE", "COMMENT"], &cells, &[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_the_layers_in_order() {
        let history = json!([
            {"created": "2024-01-01T00:00:00Z", "created_by": "ADD rootfs", "comment": "first"},
            {"created_by": "CMD [\"sh\"]", "empty_layer": true},
            {"created_by": "RUN make"},
        ]);
        let found = steps(history.as_array().unwrap(), &[10, 20, 30]);
        let found: Vec<_> = found.iter().map(|it| (&*it.created_by, it.size.0)).collect();
        // The last layer has no step.
        assert_eq!(found, [("", 30), ("RUN make", 20), ("CMD [\"sh\"]", 0), ("ADD rootfs", 10)]);
        assert_eq!(steps(&[], &[]), []);
        // A hostile configuration.
        let odd = json!([null, 7, {"created_by": 3, "empty_layer": "no"}]);
        assert_eq!(steps(odd.as_array().unwrap(), &[1]).len(), 3);
    }

    #[test]
    fn long_commands_are_cut() {
        assert_eq!(truncated(&"a".repeat(45)), "a".repeat(45));
        assert_eq!(truncated(&"ä".repeat(46)), "ä".repeat(42) + "...");
    }
}
