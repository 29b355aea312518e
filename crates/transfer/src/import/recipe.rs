//! Writes recipes while object ids are still being computed.

use std::collections::VecDeque;
use std::io::{BufWriter, Write};

use image::tar::{Segment, recipe};
use image::tree::InodeId;
use image::verity::{Algorithm, ObjectId};

use super::objects::FileDigests;

/// A part of the recipe that cannot be written yet, because this part or an earlier one waits for an object id.
#[derive(Debug)]
enum Part {
    Verbatim(Vec<u8>),
    File(File),
}

/// A file whose content is an object.
#[derive(Debug)]
struct File {
    segments: Box<[Segment]>,
    /// `None` for entries that are not in the tree: whiteouts, and ignored entries.
    inode: Option<InodeId>,
    object: Option<ObjectId>,
}

/// Writes a recipe in the tar's order, independent of the order in which object ids become known.
pub(super) struct Pending<W: Write> {
    out: recipe::Writer<BufWriter<W>>,
    parts: VecDeque<Part>,
    /// For each file in `parts`, indexed by its number minus `files_gone`: the index of its part, counted from the
    /// first part of the recipe.
    files: VecDeque<u64>,
    /// Number of parts that were written.
    parts_gone: u64,
    files_gone: u32,
    /// Number of verbatim bytes in `parts`.
    bytes: usize,
    /// The object of each file that was written.
    objects: Vec<ObjectId>,
}

impl<W: Write> Pending<W> {
    pub(super) fn new(out: W, algorithm: Algorithm) -> Result<Self, recipe::RecipeWriteError> {
        Ok(Self {
            out: recipe::Writer::new(BufWriter::with_capacity(64 << 10, out), algorithm)?,
            parts: VecDeque::new(),
            files: VecDeque::new(),
            parts_gone: 0,
            files_gone: 0,
            bytes: 0,
            objects: Vec::new(),
        })
    }

    pub(super) fn verbatim(&mut self, bytes: &[u8]) -> Result<(), recipe::RecipeWriteError> {
        match self.parts.back_mut() {
            None => return self.out.verbatim(bytes),
            Some(Part::Verbatim(run)) => run.extend_from_slice(bytes),
            Some(Part::File(_)) => self.parts.push_back(Part::Verbatim(bytes.to_vec())),
        }
        self.bytes += bytes.len();
        Ok(())
    }

    /// Adds the whole content of a file that has no object.
    pub(super) fn inline(
        &mut self,
        segments: &[Segment],
        content: &[u8],
    ) -> Result<(), recipe::RecipeWriteError> {
        for segment in segments {
            let ends = [segment.offset, segment.end()].map(usize::try_from);
            let [Ok(start), Ok(end)] = ends else { continue };
            self.verbatim(&content[start..end])?;
        }
        Ok(())
    }

    /// Adds a file whose object is not known yet, and returns the file's number.
    pub(super) fn file(&mut self, segments: &[Segment], inode: Option<InodeId>) -> u32 {
        let number =
            self.files_gone + u32::try_from(self.files.len()).expect("entries are limited");
        self.files.push_back(self.parts_gone + self.parts.len() as u64);
        self.parts.push_back(Part::File(File { segments: segments.into(), inode, object: None }));
        number
    }

    /// Sets the objects of files, and writes all parts up to the first unknown object. Calls `known` with the inode
    /// and object of each written file that is in the tree.
    pub(super) fn resolve<E: From<recipe::RecipeWriteError>>(
        &mut self,
        ids: &mut Vec<(u32, FileDigests)>,
        mut known: impl FnMut(InodeId, &ObjectId) -> Result<(), E>,
    ) -> Result<(), E> {
        for (number, id) in ids.drain(..) {
            let part = self.files[(number - self.files_gone) as usize] - self.parts_gone;
            let part = usize::try_from(part).expect("an index into memory");
            if let Part::File(file) = &mut self.parts[part] {
                file.object = Some(id.object);
            }
        }
        while let Some(part) = self.parts.front() {
            match part {
                Part::Verbatim(run) => {
                    self.out.verbatim(run)?;
                    self.bytes -= run.len();
                }
                Part::File(File { object: None, .. }) => break,
                Part::File(File { segments, inode, object: Some(id) }) => {
                    self.out.content(segments, recipe::Content::Object(id))?;
                    self.objects.push(*id);
                    if let Some(inode) = inode {
                        known(*inode, id)?;
                    }
                    self.files.pop_front();
                    self.files_gone += 1;
                }
            }
            self.parts.pop_front();
            self.parts_gone += 1;
        }
        Ok(())
    }

    /// Whether the objects of all files are known.
    pub(super) fn is_settled(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns the number of verbatim bytes that wait for object ids.
    pub(super) fn waiting(&self) -> usize {
        self.bytes
    }

    /// Ends the recipe. Returns the sink, and the objects without duplicates.
    pub(super) fn finish(mut self) -> Result<(W, Vec<ObjectId>), recipe::RecipeWriteError> {
        debug_assert!(self.parts.is_empty(), "resolve() has seen all");
        let out = self.out.finish()?;
        let out = out
            .into_inner()
            .map_err(|error| recipe::RecipeWriteError::Write(error.into_error()))?;
        self.objects.sort_unstable();
        self.objects.dedup();
        Ok((out, self.objects))
    }
}
