//! `convert`: stores an image in another form.

use clap::Args;
use store::{OpenOptions, RefName};
use transfer::import::{ImportOptions, Stored};

use crate::Answer;
use crate::args::FormOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::session::forms::choose;
use crate::session::resources::{JobResources, budget};
use crate::verbs::VerbArgs;
use crate::verbs::images::import::tell_form;

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
    let options = ImportOptions { name, form, ..ImportOptions::default() };
    // From here on `gc` keeps the image.
    let _open = store.open_found(found)?;
    let image = Stored {
        image: &found.image,
        manifest: found.manifest.as_ref(),
        name: found.name.as_ref(),
    };
    let done = JobResources::new(context, &store, budget(args.memory)?)
        .during(|environment| transfer::import::convert(&store, &image, environment, &options))??;
    let opened = store.open_names(&done.image)?;
    let sizes: Vec<_> = opened.devices.iter().map(|it| it.1).collect();
    let mut text = opened.form.to_string();
    if !sizes.is_empty() {
        let (devices, size) = (report::count(sizes.len(), "device"), sizes.iter().sum());
        text += &format!(", in {devices} of {}", report::size(size));
    }
    if done.image == found.image {
        text += ", as before";
    }
    tell_form(context, &done, Some(&text))?;
    Ok(Answer::Yes)
}
