# Prints the targets of the Makefile that carry a `## text`, in their order.
BEGIN { FS = ":.*## "; print "sft-play: fine-tune language models on one GPU or many\n" }
/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $1, $2 }
END { print "\nStart with: make demo" }
