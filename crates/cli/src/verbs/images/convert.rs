//! `convert`: stores an image in another form.

use clap::Args;
use store::{OpenOptions, RefName};
use transfer::import::{ImportOptions, Stored};

use crate::Answer;
use crate::args::FormOptions;
use crate::session::context::Context;
use crate::session::forms::choose;
use crate::session::resources::{JobResources, budget};
use crate::verbs::VerbArgs;
use crate::verbs::images::import::tell;

// The image, and the form in which it is stored.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Name of the converted image; by default the old name moves to it
    pub(crate) new: Option<String>,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

impl VerbArgs for Convert {
    const NAME: &'static str = "convert";
    const ABOUT: &'static str = "Store an image in another form (objects, packed or tar)";
    const DETAILS: &'static str = "\
        Quire verifies every byte while it converts. `quire gc` then frees the data that only the old form \
        needed.";
    const EXAMPLES: &'static str = "quire convert --form packed debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        convert(context, self)
    }
}

pub(crate) fn convert(context: &Context, args: &Convert) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let permitted = crate::session::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let new: Option<RefName> = args.new.as_deref().map(str::parse).transpose()?;
    let name = new.as_ref().or(found.name.as_ref());
    let form = choose(&args.form, &store)?;
    let wishes = ImportOptions { name, form, ..ImportOptions::default() };
    // From here on, `gc` keeps the image.
    let _open = store.open_found(found)?;
    let image = Stored {
        image: &found.image,
        manifest: found.manifest.as_ref(),
        name: found.name.as_ref(),
    };
    let done =
        JobResources::new(context, &store, budget(args.memory)?).during(|surroundings| {
            transfer::import::convert(&store, &image, surroundings, &wishes)
        })??;
    tell(context, &done)?;
    Ok(Answer::Yes)
}
