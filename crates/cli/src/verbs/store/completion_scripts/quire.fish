# Completion of quire for fish. It asks quire for the words.
# Prints each word after the first, with the first before it.
function __quire_each
    for word in $argv[2..-1]
        printf '%s\n' "$argv[1]$word"
    end
end
function __quire_offer
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    # The words before may be `sudo`, or variables.
    while set -q words[2]; and not string match -qr '(^|/)quire$' -- $words[1]
        set -e words[1]
    end
    # fish leaves `~` in the words as it is.
    if string match -q '~/*' -- $words[1]
        set words[1] $HOME(string sub -s 2 -- $words[1])
    end
    # fish offers only what begins with the whole word, so the option stays before its value.
    set -l option (string match -r '^--[^=]*=' -- "$current")
    set -l value (string replace -r '^--[^=]*=' '' -- "$current")
    for line in ($words[1] completions fish -- $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case :files
                __quire_each "$option" (__fish_complete_path "$value")
            case :directories
                __quire_each "$option" (__fish_complete_directories "$value")
            case :programs
                __quire_each "$option" (complete -C "$value")
            case '*'
                printf '%s\n' "$line"
        end
    end
end
complete -c quire -f -a '(__quire_offer)'
